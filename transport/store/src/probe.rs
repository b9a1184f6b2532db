//! Asks a store, by a small object: whether it honours create-if-absent, and what time it is there.

use std::time::SystemTime;

use crate::error::{Error, Result};
use crate::key::Key;
use crate::store::{PutMode, Store};

/// Checks that `store` honours create-if-absent: some servers accept the condition and ignore it, and two
/// publishers would then overwrite each other's versions. Writes and removes one small object under
/// `probes/`.
///
/// # Errors
/// [`Error::ConditionalPutIgnored`] for a store that ignores it, otherwise whatever the store reports.
pub fn probe_conditional_put(store: &dyn Store) -> Result<()> {
    let key = fresh_key()?;
    match store.put(&key, b"first", PutMode::Create) {
        // The name is new to the world: a proxy has sent the put twice, and this answers the second one.
        Ok(()) | Err(Error::AlreadyExists { .. }) => {}
        Err(error) => return Err(error),
    }
    let second = store.put(&key, b"second", PutMode::Create);
    let kept = store.get(&key, None);
    let removed = store.delete(&key);
    match second {
        Err(Error::AlreadyExists { .. }) if kept? == b"first" => removed,
        Ok(()) | Err(Error::AlreadyExists { .. }) => {
            Err(Error::ConditionalPutIgnored { store: store.to_string() })
        }
        Err(error) => Err(error),
    }
}

/// The store's own time: the date that it gives to an object put now; `None` if it dates nothing. Writes and removes one
/// small object under `probes/`.
///
/// # Errors
/// Whatever the store reports.
pub fn store_time(store: &dyn Store) -> Result<Option<SystemTime>> {
    let key = fresh_key()?;
    store.put(&key, b"time", PutMode::Overwrite)?;
    let entry = store.head(&key);
    store.delete(&key)?;
    Ok(entry?.modified)
}

/// One that nobody else has.
fn fresh_key() -> Result<Key> {
    Key::new(format!("probes/{}", hex::encode(rand::random::<[u8; 16]>())))
}
