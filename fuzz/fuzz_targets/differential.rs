//! What this machine's fastest paths encode, the plain decoder made from the format's page decodes: the two share no code.
#![no_main]

#[path = "../../delta/tests/common/stranger.rs"]
mod stranger;

use driftless_delta::{DigestTable, Element, Encoder, Motion, Profile, Serial, Source};
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
    let (mut encoder, mut payload) = (Encoder::new(), Vec::new());
    let source = Source { element, bytes: base, digests: &digests };
    let mut motion = Motion::start(source).expect("its own digests");
    encoder.encode_after(&Serial, source, &motion, &new, profile, &mut payload).expect("equal lengths");
    assert_eq!(stranger::decode(base, &payload), new);
    motion.advance(encoder.moves()).expect("consecutive steps");
    // Half of the way back, in the light of the first step.
    let half = base.len() / 2;
    let back = [&base[..half], &new[half..]].concat();
    let digests = encoder.digests().clone();
    let source = Source { element, bytes: &new, digests: &digests };
    payload.clear();
    encoder.encode_after(&Serial, source, &motion, &back, profile, &mut payload).expect("equal lengths");
    let mut theirs = stranger::start(first % 6, base);
    stranger::advance(first % 6, &mut theirs, base, &new);
    assert_eq!(stranger::decode_after(&new, Some(&theirs), &payload), back);
});
