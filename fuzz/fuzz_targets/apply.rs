//! What was encoded comes back bit for bit, through the journal too: base and new are the two halves of the
//! input, or the base with edits.
#![no_main]

use std::cell::RefCell;

use driftless_delta::{Decoder, DigestTable, Element, Encoder, Patch, Profile, Serial, Source};
use libfuzzer_sys::fuzz_target;

const ELEMENTS: [Element; 6] =
    [Element::Bytes, Element::F8E4M3, Element::F8E5M2, Element::F16, Element::Bf16, Element::F32];

#[derive(Default)]
struct Reused {
    encoder: Encoder,
    decoder: Decoder,
    payload: Vec<u8>,
    patch: Patch,
}

thread_local! {
    static REUSED: RefCell<Reused> = RefCell::default();
}

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
    let source = Source { element, bytes: base, digests: &digests };
    REUSED.with_borrow_mut(|Reused { encoder, decoder, payload, patch }| {
        payload.clear();
        encoder.encode(&Serial, source, &new, profile, payload).expect("equal lengths");
        assert_eq!(*encoder.digests(), DigestTable::of(element, &new).expect("whole elements"));
        decoder.decode(&Serial, source, payload, patch).expect("own payload");
        let mut tensor = base.to_vec();
        patch.apply_to(&mut tensor).expect("same length");
        assert_eq!(tensor, new);
        tensor.copy_from_slice(base);
        Patch::from_bytes(&patch.to_bytes())
            .and_then(|patch| patch.apply_to(&mut tensor))
            .expect("own patch");
        assert_eq!(tensor, new);
        payload.clear();
        encoder.encode_full(&Serial, element, &new, payload).expect("whole elements");
        tensor.fill(0x55);
        decoder.decode_full(&Serial, element, payload, &mut tensor).expect("own payload");
        assert_eq!(tensor, new);
    });
});
