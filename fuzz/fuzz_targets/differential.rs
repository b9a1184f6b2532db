//! What this machine's fastest paths encode, the plain decoder made from the format's page decodes: the two
//! share no code.
#![no_main]

use driftless_delta::{DigestTable, Element, Profile, encode};
use driftless_testkit::stranger;
use libfuzzer_sys::fuzz_target;

const ELEMENTS: [Element; 6] =
    [Element::Bytes, Element::F8E4M3, Element::F8E5M2, Element::F16, Element::Bf16, Element::F32];

fuzz_target!(|data: &[u8]| {
    let Some((&first, data)) = data.split_first() else { return };
    let element = ELEMENTS[usize::from(first % 6)];
    let profile = if first & 0x80 == 0 { Profile::Wire } else { Profile::Fast };
    let (base, edits) = data.split_at(data.len() / 2 / element.size() * element.size());
    let mut new = base.to_vec();
    for (byte, edit) in new.iter_mut().zip(edits) {
        // Most inputs change little, as weights do.
        *byte = if first & 0x40 == 0 { byte.wrapping_add(edit & 1) } else { *edit };
    }
    let digests = DigestTable::of(element, base).expect("whole elements");
    let mut payload = Vec::new();
    encode(element, base, &new, &digests, profile, &mut payload).expect("equal lengths");
    assert_eq!(stranger::decode(base, &payload), new);
});
