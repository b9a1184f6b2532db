//! What patches change in a tensor, element by element: for whoever writes single elements into weights.

use crate::element::Element;
use crate::error::{Result, expect_length};
use crate::patch::{BlockChanges, Patch};

/// Elements of a tensor that change, as three arrays.
#[derive(Debug, Default)]
pub struct Elements {
    /// Which they are, counted from the tensor's first, strictly ascending: little-endian `u32`.
    pub positions: Vec<u8>,
    /// Their new values, in the same order.
    pub new: Vec<u8>,
    /// Their values in the base, in the same order.
    pub old: Vec<u8>,
}

impl Elements {
    /// Takes the elements of `base` that differ after all `patches`, each with the byte of the tensor at which it
    /// begins; what was there goes. Of two patches for one element the later one counts. False where positions of 32
    /// bits do not name the elements.
    ///
    /// # Errors
    /// [`Error::LengthMismatch`](crate::Error::LengthMismatch) for a patch that reaches beyond `base`.
    pub fn take(&mut self, element: Element, base: &[u8], patches: &[(u64, Patch)]) -> Result<bool> {
        [&mut self.positions, &mut self.new, &mut self.old].into_iter().for_each(Vec::clear);
        let size = element.size();
        if u32::try_from(base.len() / size).is_err() {
            return Ok(false);
        }
        for (offset, patch) in patches {
            let end = offset.saturating_add(patch.tensor_bytes());
            expect_length("tensor", end.max(base.len() as u64), base.len())?;
        }
        match size {
            1 => self.take_as::<1>(base, patches),
            2 => self.take_as::<2>(base, patches),
            _ => self.take_as::<4>(base, patches),
        }
        Ok(true)
    }

    /// As [`Elements::take`], of patches within a base of elements of `SIZE` bytes.
    fn take_as<const SIZE: usize>(&mut self, base: &[u8], patches: &[(u64, Patch)]) {
        let base = base.as_chunks::<SIZE>().0;
        let blocks = patches.iter().flat_map(|(offset, patch)| {
            patch.blocks().map(move |block| (*offset as usize / SIZE + block.first, block))
        });
        if patches.windows(2).all(|pair| pair[0].0 + pair[0].1.tensor_bytes() <= pair[1].0) {
            for (first, block) in blocks {
                match (block.positions, block.old) {
                    (Some(positions), Some(old)) => self.add_known(first, positions, block.values, old),
                    (Some(positions), None) => self.add(base, places(first, positions).zip(values(&block))),
                    (None, _) => {
                        let count = values::<SIZE>(&block).len();
                        self.add(base, (first..first + count).zip(values(&block)));
                    }
                }
            }
            return;
        }
        let mut found: Vec<(usize, &[u8; SIZE])> = Vec::new();
        for (first, block) in blocks {
            match block.positions {
                Some(positions) => found.extend(places(first, positions).zip(values(&block))),
                None => found.extend((first..).zip(values(&block))),
            }
        }
        found.reverse();
        found.sort_by_key(|(place, _)| *place);
        found.dedup_by_key(|(place, _)| *place);
        self.add(base, found.into_iter());
    }

    /// Adds elements of a block that begins at `first`, whose values in the base are known and other ones.
    fn add_known(&mut self, first: usize, positions: &[[u8; 2]], new: &[u8], old: &[u8]) {
        let at = self.positions.len();
        self.positions.resize(at + positions.len() * size_of::<u32>(), 0);
        let targets = self.positions[at..].as_chunks_mut().0.iter_mut();
        for (target, place) in targets.zip(places(first, positions)) {
            *target = (place as u32).to_le_bytes();
        }
        self.new.extend_from_slice(new);
        self.old.extend_from_slice(old);
    }

    /// Adds elements, ascending, where they differ from the base's.
    #[inline(always)]
    fn add<'a, const SIZE: usize>(
        &mut self,
        base: &[[u8; SIZE]],
        elements: impl ExactSizeIterator<Item = (usize, &'a [u8; SIZE])>,
    ) {
        let Self { positions, new, old } = self;
        let (at, values, count) = (positions.len(), new.len(), elements.len());
        positions.resize(at + count * size_of::<u32>(), 0);
        new.resize(values + count * SIZE, 0);
        old.resize(values + count * SIZE, 0);
        let places = positions[at..].as_chunks_mut().0;
        let (after, before) = (new[values..].as_chunks_mut().0, old[values..].as_chunks_mut().0);
        let mut kept = 0;
        // What does not differ is written over by what follows: a branch here would be guessed wrong too often.
        for (place, value) in elements {
            let held = base[place];
            (places[kept], after[kept], before[kept]) = ((place as u32).to_le_bytes(), *value, held);
            kept += usize::from(held != *value);
        }
        positions.truncate(at + kept * size_of::<u32>());
        new.truncate(values + kept * SIZE);
        old.truncate(values + kept * SIZE);
    }
}

/// The elements at these positions of a block that begins at element `first`.
fn places(first: usize, positions: &[[u8; 2]]) -> impl ExactSizeIterator<Item = usize> {
    positions.iter().map(move |at| first + usize::from(u16::from_le_bytes(*at)))
}

fn values<'a, const SIZE: usize>(block: &BlockChanges<'a>) -> std::slice::Iter<'a, [u8; SIZE]> {
    block.values.as_chunks().0.iter()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::choose::Profile;
    use crate::decode::decode;
    use crate::digest::DigestTable;
    use crate::encode::encode;

    const SIZE: usize = 2;

    fn patch(base: &[u8], new: &[u8]) -> Patch {
        let digests = DigestTable::of(Element::Bf16, base).unwrap();
        let (mut payload, mut patch) = (Vec::new(), Patch::new());
        encode(Element::Bf16, base, new, &digests, Profile::Fast, &mut payload).unwrap();
        decode(Element::Bf16, base, &digests, &payload, &mut patch).unwrap();
        patch
    }

    /// A tensor of four blocks and a part, in which every `apart`-th element is another one, and all of one block.
    fn changed(base: &[u8], apart: usize, block: usize) -> Vec<u8> {
        let mut new = base.to_vec();
        let own = |at: usize| at.is_multiple_of(apart) || at / 65_536 == block;
        (0..new.len() / SIZE).filter(|at| own(*at)).for_each(|at| new[at * SIZE] ^= 1 + (at % 3) as u8);
        new
    }

    fn expected(base: &[u8], new: &[u8]) -> [Vec<u8>; 3] {
        let mut found: [Vec<u8>; 3] = Default::default();
        for (at, (old, new)) in (0_u32..).zip(base.chunks(SIZE).zip(new.chunks(SIZE))) {
            if old != new {
                found[0].extend(at.to_le_bytes());
                found[1].extend(new);
                found[2].extend(old);
            }
        }
        found
    }

    fn taken(base: &[u8], patches: &[(u64, Patch)]) -> [Vec<u8>; 3] {
        // What was there before goes.
        let mut elements = Elements { positions: vec![1; 8], ..Elements::default() };
        assert!(elements.take(Element::Bf16, base, patches).unwrap());
        [elements.positions, elements.new, elements.old]
    }

    #[test]
    #[cfg_attr(miri, ignore = "a quarter of a million elements")]
    fn elements_are_those_that_differ() {
        let base: Vec<u8> = (0..4 * 65_536 * SIZE + 90).map(|at| (at * 7 / 3) as u8).collect();
        let [new, newer] = [changed(&base, 61, 2), changed(&changed(&base, 61, 2), 122, 1)];
        let [first, second] = [patch(&base, &new), patch(&new, &newer)];
        let read_back = |patch: &Patch| Patch::from_bytes(&patch.to_bytes()).unwrap();
        assert_eq!(taken(&base, &[]), <[Vec<u8>; 3]>::default());
        assert_eq!(taken(&base, &[(0, first.clone())]), expected(&base, &new));
        assert_eq!(taken(&base, &[(0, read_back(&first))]), expected(&base, &new));
        // Versions one behind the other, which set some elements back.
        let back = patch(&newer, &base);
        for (patches, last) in [(vec![&first, &second], &newer), (vec![&first, &second, &back], &base)] {
            let patches: Vec<_> = patches.into_iter().map(|patch| (0, read_back(patch))).collect();
            assert_eq!(taken(&base, &patches), expected(&base, last));
        }
        // Pieces of a tensor.
        let cut = 2 * 65_536 * SIZE + 40;
        let pieces = [patch(&base[..cut], &new[..cut]), patch(&base[cut..], &new[cut..])];
        let pieces: Vec<_> = [0, cut as u64].into_iter().zip(pieces).collect();
        assert_eq!(taken(&base, &pieces), expected(&base, &new));
        let beyond = Elements::default().take(Element::Bf16, &base[2..], &pieces);
        assert!(matches!(beyond, Err(crate::Error::LengthMismatch { .. })), "{beyond:?}");
    }
}
