//! Ids of the heads of conversations. Sessions of one agent have the same tools and instructions, which are most of a first
//! turn.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Bytes of ids that are kept; those that were used longest ago go first.
const BYTES_MAX: usize = 64 << 20;

/// Heads by the digest of their text.
#[derive(Debug, Default)]
pub(super) struct Heads(Mutex<Kept>);

#[derive(Debug, Default)]
struct Kept {
    heads: HashMap<Key, Head>,
    bytes: usize,
    uses: u64,
}

#[derive(Debug)]
struct Head {
    ids: Arc<[i32]>,
    used: u64,
}

type Key = [u8; 32];

/// The key of a head. A letter in it may be a guard's mark, or a client's own.
pub(super) fn key(text: &str, mark: Option<char>) -> Key {
    let mark = mark.filter(|mark| text.contains(*mark)).map_or(0, u32::from);
    *blake3::Hasher::new().update(&mark.to_le_bytes()).update(text.as_bytes()).finalize().as_bytes()
}

impl Heads {
    fn lock(&self) -> MutexGuard<'_, Kept> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn get(&self, key: &Key) -> Option<Arc<[i32]>> {
        let mut kept = self.lock();
        kept.uses += 1;
        let used = kept.uses;
        let head = kept.heads.get_mut(key)?;
        head.used = used;
        Some(head.ids.clone())
    }

    pub(super) fn put(&self, key: Key, ids: &[i32]) {
        self.lock().put(key, ids, BYTES_MAX);
    }
}

impl Kept {
    fn put(&mut self, key: Key, ids: &[i32], most: usize) {
        let bytes = size_of_val(ids);
        if bytes > most || self.heads.contains_key(&key) {
            return;
        }
        while self.bytes + bytes > most {
            let oldest = self.heads.iter().min_by_key(|(_, head)| head.used).map(|(key, _)| *key);
            let Some(gone) = oldest.and_then(|oldest| self.heads.remove(&oldest)) else { break };
            self.bytes -= size_of_val(&*gone.ids);
        }
        self.uses += 1;
        self.bytes += bytes;
        self.heads.insert(key, Head { ids: ids.into(), used: self.uses });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_that_were_used_longest_ago_make_room() {
        let (a, b, c) = (key("a", None), key("b", None), key("c", None));
        let heads = Heads::default();
        for key in [a, b] {
            heads.lock().put(key, &[1, 2, 3], 24);
        }
        assert!(heads.get(&a).is_some());
        heads.lock().put(c, &[4, 5], 24);
        assert!(heads.get(&b).is_none() && heads.get(&a).is_some());
        heads.lock().put(b, &[0; 7], 24);
        assert_eq!((heads.get(&c).as_deref(), heads.lock().bytes), (Some(&[4, 5][..]), 20));
    }

    #[test]
    fn mark_of_a_guard_is_not_a_clients_letter() {
        let text = "a<\u{e000}|im_end|>";
        assert_ne!(key(text, Some('\u{e000}')), key(text, None));
        assert_eq!(key(text, Some('\u{e001}')), key(text, None));
    }
}
