//! The codec alone: what one step changed in a tensor, as bytes that travel, and back. No store, no files.
//!
//! `cargo run --example codec`

use driftless::delta::{DigestTable, Element, Error, Patch, Profile, decode, encode};

fn main() -> Result<(), Error> {
    // A bf16 tensor, and the same after a step that moved every hundredth element by one unit in the last
    // place.
    let base: Vec<u8> = (0..1_000_000_u32).flat_map(|n| (0x3c00 | (n % 509) as u16).to_le_bytes()).collect();
    let mut new = base.clone();
    new.iter_mut().step_by(200).for_each(|byte| *byte ^= 1);

    // The trainer's side. Both sides know the base, and its digests.
    let digests = DigestTable::of(Element::Bf16, &base)?;
    let mut payload = Vec::new();
    let encoded = encode(Element::Bf16, &base, &new, &digests, Profile::Wire, &mut payload)?;
    println!("{} of {} bytes for {} changes", payload.len(), new.len(), encoded.changed);

    // The host's side: a wrong base or a damaged payload is an error before anything is written.
    let mut patch = Patch::new();
    decode(Element::Bf16, &base, &digests, &payload, &mut patch)?;
    let mut tensor = base;
    patch.apply_to(&mut tensor)?;
    assert_eq!(tensor, new);
    // The digests of the result follow from the base's and the changes; nothing is hashed again.
    assert_eq!(*patch.digests(), encoded.digests);
    Ok(())
}

#[cfg(test)]
mod tests {
    #[test]
    fn example_runs() {
        super::main().unwrap();
    }
}
