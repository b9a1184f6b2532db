//! A second decoder, written from docs/format/delta.md and sharing nothing with the crate: slow, plain, bit
//! by bit.

const BLOCK_ELEMENTS: usize = 65_536;

struct Bits<'a>(&'a [u8], usize);

impl Bits<'_> {
    fn bit(&mut self) -> u64 {
        let bit = self.0[self.1 / 8] >> (self.1 % 8) & 1;
        self.1 += 1;
        bit.into()
    }

    fn number(&mut self, bits: u32) -> u64 {
        (0..bits).fold(0, |number, at| number | self.bit() << at)
    }

    fn zeros(&mut self, most: u64) -> u64 {
        let mut zeros = 0;
        while zeros < most && self.bit() == 0 {
            zeros += 1;
        }
        zeros
    }

    fn near(&mut self) -> i64 {
        let zigzag = self.zeros(127) as i64;
        if zigzag % 2 == 0 { zigzag / 2 } else { -(zigzag + 1) / 2 }
    }

    fn runs(&mut self, k: u32, items: u64) -> Vec<u64> {
        let (mut next, mut marked) = (0, Vec::new());
        while next < items {
            if self.bit() == 0 {
                next += 1 << k;
            } else {
                next += self.number(k) + 1;
                marked.push(next - 1);
            }
        }
        marked
    }

    fn rice(&mut self, k: u32, width: u32) -> u64 {
        match self.zeros(20) {
            20 => self.number(width),
            quotient => quotient << k | self.number(k),
        }
    }
}

fn varint(bytes: &mut &[u8]) -> u64 {
    let (mut value, mut shift) = (0, 0);
    loop {
        let byte = bytes[0];
        *bytes = &bytes[1..];
        value |= u64::from(byte & 0x7f) << shift;
        shift += 7;
        if byte < 0x80 {
            return value;
        }
    }
}

fn take<'a>(bytes: &mut &'a [u8], count: usize) -> &'a [u8] {
    let (taken, rest) = bytes.split_at(count);
    *bytes = rest;
    taken
}

fn key(seed: u8, index: u64) -> u64 {
    let seed = 0x6472_6966_746c_6500 | u64::from(seed);
    let z = seed.wrapping_add((index + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    (z ^ z >> 31) | 1
}

fn check(bytes: &[u8]) -> u64 {
    let (mut first, mut second) = (0_u64, 0_u64);
    for (j, word) in (0_u64..).zip(bytes.chunks(4)) {
        let w = word.iter().rev().fold(0_u32, |w, byte| w << 8 | u32::from(*byte));
        let term = |w: u32, a, m| u64::from(w).wrapping_mul(key(a, j % 1024)).wrapping_mul(key(m, j / 1024));
        first = first.wrapping_add(term(w, b'A', b'M'));
        second = second.wrapping_add(term(w.rotate_left(16), b'B', b'N'));
    }
    first.wrapping_add(second)
}

#[derive(Clone, Copy)]
struct Type {
    bits: u32,
    mantissa: u32,
    opaque: bool,
}

impl Type {
    fn of(code: u8) -> Self {
        let (bits, mantissa) = [(8, 0), (8, 3), (8, 2), (16, 10), (16, 7), (32, 23)][usize::from(code)];
        Self { bits, mantissa, opaque: code == 0 }
    }

    fn size(self) -> usize {
        self.bits as usize / 8
    }

    fn mask(self) -> u64 {
        (1 << self.bits) - 1
    }

    fn ordered(self, x: u64) -> u64 {
        let sign = 1 << (self.bits - 1);
        if self.opaque {
            x
        } else if x & sign != 0 {
            !x & self.mask()
        } else {
            x | sign
        }
    }

    fn unordered(self, order: u64) -> u64 {
        let sign = 1 << (self.bits - 1);
        if self.opaque {
            order
        } else if order & sign != 0 {
            order ^ sign
        } else {
            !order & self.mask()
        }
    }

    fn exponent(self, x: u64) -> u64 {
        if self.opaque { 0 } else { (x & (self.mask() >> 1)) >> self.mantissa }
    }
}

fn elements(kind: Type, bytes: &[u8]) -> Vec<u64> {
    bytes.chunks(kind.size()).map(|e| e.iter().rev().fold(0, |x, byte| x << 8 | u64::from(*byte))).collect()
}

/// First exponent; (inverted, run, large run, rice) of each class.
type Table = (u64, Vec<(bool, i64, i64, i64)>);

fn table(bytes: &[u8]) -> Table {
    let mut bits = Bits(bytes, 0);
    let count = bits.number(4) + 1;
    let first = if count > 1 { bits.number(8) } else { 0 };
    let inverts = bits.bit() == 1;
    let (mut run, mut large, mut rice) = (5, 3, 0);
    let one = |_| {
        let inverted = inverts && bits.bit() == 1;
        run += 1 + bits.near();
        large += bits.near();
        rice += bits.near();
        (inverted, run, large, rice)
    };
    (first, (0..count).map(one).collect())
}

fn changes(kind: Type, bytes: &[u8], table: &Table, base: &[u64]) -> Vec<u64> {
    let (first, classes) = table;
    let mut bits = Bits(bytes, 0);
    let mut new = base.to_vec();
    let shift = bits.number(3) as i64 - 3;
    let class_of =
        |at: usize| (kind.exponent(base[at]).saturating_sub(*first) as usize).min(classes.len() - 1);
    for (index, &(inverted, run, large_run, rice)) in classes.iter().enumerate() {
        let members: Vec<usize> = (0..base.len()).filter(|at| class_of(*at) == index).collect();
        let count = members.len() as u64;
        let run = if inverted { run } else { (run + shift).clamp(0, 16) };
        let marked = bits.runs(run as u32, count);
        let changed: Vec<u64> =
            (0..count).filter(|rank| marked.binary_search(rank).is_ok() != inverted).collect();
        let large: Vec<u64> = match large_run {
            7 => (0..changed.len() as u64).collect(),
            8 => vec![],
            run => bits.runs(run as u32, changed.len() as u64),
        };
        let negative: Vec<bool> = changed.iter().map(|_| bits.bit() == 1).collect();
        let mut sizes = vec![1; changed.len()];
        for at in large {
            sizes[at as usize] = bits.rice(rice as u32, kind.bits) + if large_run == 7 { 1 } else { 2 };
        }
        for ((rank, size), negative) in changed.into_iter().zip(sizes).zip(negative) {
            let at = members[rank as usize];
            let step = if negative { size.wrapping_neg() } else { size };
            new[at] = kind.unordered(kind.ordered(base[at]).wrapping_add(step) & kind.mask());
        }
    }
    assert_eq!(bits.1.div_ceil(8), bytes.len());
    new
}

/// Reads one of `codes`: (length, code, symbol).
fn symbol(bits: &mut Bits<'_>, codes: &[(u64, u64, u64)]) -> u64 {
    let (mut length, mut code) = (0, 0);
    loop {
        (length, code) = (length + 1, code << 1 | bits.bit());
        if let Some(found) = codes.iter().find(|entry| (entry.0, entry.1) == (length, code)) {
            return found.2;
        }
    }
}

fn entropy(kind: Type, mut bytes: &[u8], count: usize) -> Vec<u64> {
    let [first, last] = take(&mut bytes, 2).try_into().unwrap();
    let symbols = usize::from(first)..=usize::from(last);
    let mut codes = Vec::new();
    if first < last {
        let mut bits = Bits(take(&mut bytes, symbols.clone().count().div_ceil(2)), 0);
        let lengths: Vec<u64> = symbols.clone().map(|_| bits.number(4)).collect();
        let mut next = 0;
        for length in 1..=11 {
            for (symbol, _) in symbols.clone().zip(&lengths).filter(|(_, own)| **own == length) {
                codes.push((length, next, symbol as u64));
                next += 1;
            }
            next <<= 1;
        }
    }
    let low = take(&mut bytes, count * (kind.size() - 1));
    let sizes: Vec<usize> =
        take(&mut bytes, 12).chunks(4).map(|s| u32::from_le_bytes(s.try_into().unwrap()) as usize).collect();
    let quarter = count.div_ceil(4);
    let mut out = Vec::new();
    for stream in 0..4 {
        let size = sizes.get(stream).copied().unwrap_or(bytes.len());
        let mut bits = Bits(take(&mut bytes, size), 0);
        for at in (stream * quarter).min(count)..((stream + 1) * quarter).min(count) {
            let symbol = if first < last { symbol(&mut bits, &codes) } else { first.into() };
            let low = &low[at * (kind.size() - 1)..][..kind.size() - 1];
            let rotated = low.iter().rev().fold(symbol, |x, byte| x << 8 | u64::from(*byte));
            out.push((rotated >> 1 | rotated << (kind.bits - 1)) & kind.mask());
        }
    }
    out
}

/// Decodes one payload; panics where it is not a sound one.
pub fn decode(base: &[u8], mut payload: &[u8]) -> Vec<u8> {
    let kind = payload[0] >> 4;
    let element = Type::of(payload[0] & 15);
    payload = &payload[1..];
    if kind == 1 {
        let short = u16::from_le_bytes(take(&mut payload, 2).try_into().unwrap());
        assert_eq!(u64::from(short), check(base) >> 48);
    }
    let base = elements(element, base);
    let count = if kind == 3 { varint(&mut payload) as usize } else { base.len() };
    let promised = u64::from_le_bytes(take(&mut payload, 8).try_into().unwrap());
    let mut new = if kind == 2 { base.clone() } else { Vec::new() };
    let mut current = None;
    while new.len() < count {
        let token = varint(&mut payload);
        let value = (token >> 3) as usize;
        let block = new.len()..count.min(new.len() + BLOCK_ELEMENTS);
        let blocks = new.len()..count.min(new.len() + value * BLOCK_ELEMENTS);
        match token & 7 {
            0 => new.extend(&base[blocks]),
            1 => new.extend(elements(element, take(&mut payload, blocks.len() * element.size()))),
            2 => {
                let coded = take(&mut payload, value);
                new.extend(changes(element, coded, current.as_ref().unwrap(), &base[block]));
            }
            3 => current = Some(table(take(&mut payload, value))),
            4 => new.extend(entropy(element, take(&mut payload, value), block.len())),
            mode => panic!("mode {mode}"),
        }
    }
    assert!(payload.is_empty());
    let bytes: Vec<u8> = new
        .iter()
        .flat_map(|x| x.to_le_bytes().into_iter().take(element.size()).collect::<Vec<_>>())
        .collect();
    assert_eq!(check(&bytes), promised);
    bytes
}
