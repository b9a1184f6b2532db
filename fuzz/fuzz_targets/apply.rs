//! What was encoded comes back bit for bit, through the journal too: base and new are the two halves of the input, or the base with edits.
#![no_main]

use driftless_delta::{DigestTable, Element, Patch, Profile, decode, decode_full, encode, encode_full};
use libfuzzer_sys::fuzz_target;

const ELEMENTS: [Element; 6] =
    [Element::Bytes, Element::F8E4M3, Element::F8E5M2, Element::F16, Element::Bf16, Element::F32];

fuzz_target!(|data: &[u8]| {
    let Some((&first, data)) = data.split_first() else { return };
    let element = ELEMENTS[usize::from(first % 6)];
    let profile = if first & 0x80 == 0 { Profile::Wire } else { Profile::Fast };
    let (base, edits) = data.split_at(data.len() / 2 / element.size() * element.size());
    let mut new = base.to_vec();
    if first & 0x40 == 0 {
        new.copy_from_slice(&edits[..base.len()]);
    } else if !new.is_empty() {
        for edit in edits.chunks_exact(3) {
            let at = usize::from(u16::from_le_bytes([edit[0], edit[1]])) % new.len();
            new[at] = new[at].wrapping_add(edit[2]);
        }
    }
    let digests = DigestTable::of(element, base).expect("whole elements");
    let mut payload = Vec::new();
    let encoded = encode(element, base, &new, &digests, profile, &mut payload).expect("equal lengths");
    let mut patch = Patch::new();
    decode(element, base, &digests, &payload, &mut patch).expect("own payload");
    let mut tensor = base.to_vec();
    Patch::from_bytes(&patch.to_bytes()).and_then(|patch| patch.apply_to(&mut tensor)).expect("own patch");
    assert_eq!(tensor, new);
    assert_eq!(encoded.digests, DigestTable::of(element, &new).expect("whole elements"));
    payload.clear();
    encode_full(element, &new, &mut payload).expect("whole elements");
    tensor.fill(0x55);
    decode_full(element, &payload, &mut tensor).expect("own payload");
    assert_eq!(tensor, new);
});
