//! Durable named positions.

use std::sync::Arc;

use crate::error::{Error, Result};
use crate::position::hex;
use crate::position::{Identity, Position};
use crate::shared::Shared;
use crate::storage::Storage;

const PREFIX: &str = "cursor-";
const MAGIC: &str = "driftless-cursor";

/// A consumer's durable position: the next record it wants to read.
///
/// A trainer that must train on every record exactly once keeps the position in its own checkpoint too. After
/// a restart it continues from there. The cursor then tells the log what may be removed.
#[derive(Debug)]
pub struct Cursor {
    shared: Arc<Shared>,
    name: String,
    position: Position,
}

impl Cursor {
    pub(crate) fn open(shared: Arc<Shared>, name: &str) -> Result<Self> {
        let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
        if name.is_empty() || name.len() > 64 || !name.bytes().all(allowed) {
            let found = format!("`{name}`");
            return Err(Error::invalid("cursor name", "1 to 64 of A-Z a-z 0-9 . _ -", found));
        }
        let position = read(&*shared.storage, &format!("{PREFIX}{name}"), &shared.options().identity)?;
        Ok(Self { shared, name: name.to_owned(), position: position.unwrap_or_default() })
    }

    /// The position that is on stable storage.
    #[must_use]
    pub fn position(&self) -> Position {
        self.position
    }

    /// Moves the cursor, forwards or back. On return the new position is on stable storage; after a crash it
    /// is either the old or the new one.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a position beyond the end of what is durable, [`Error::LockLost`] and
    /// [`Error::Io`] (the cursor has not moved).
    pub fn commit(&mut self, position: Position) -> Result<()> {
        let end = Position(self.shared.lock().ledger.visible());
        if position > end {
            let expected = format!("at most {end}, the end of the durable records");
            return Err(Error::invalid("cursor position", expected, position));
        }
        self.shared.check_owner()?;
        let file = format!("{PREFIX}{}", self.name);
        let text = encode(position, &self.shared.options().identity);
        self.shared
            .storage
            .replace(&file, text.as_bytes())
            .map_err(Error::io("write", self.shared.storage.path(&file)))?;
        self.position = position;
        Ok(())
    }
}

fn encode(position: Position, identity: &Identity) -> String {
    let text = format!("{MAGIC} 1 {} {position}", hex(&identity.run_id));
    format!("{text} {:08x}\n", crc32c::crc32c(text.as_bytes()))
}

/// Position and run id (in hex) of a cursor file; `None` when it is damaged.
fn decode(bytes: &[u8]) -> Option<(Position, &str)> {
    let line = std::str::from_utf8(bytes).ok()?.strip_suffix('\n')?;
    let (text, crc) = line.rsplit_once(' ')?;
    if format!("{:08x}", crc32c::crc32c(text.as_bytes())) != crc {
        return None;
    }
    let (run_id, position) = text.strip_prefix(MAGIC)?.strip_prefix(" 1 ")?.split_once(' ')?;
    Some((Position(position.parse().ok()?), run_id))
}

fn read(storage: &dyn Storage, file: &str, identity: &Identity) -> Result<Option<Position>> {
    let path = storage.path(file);
    let Some(bytes) = storage.read(file).map_err(Error::io("read", &path))? else { return Ok(None) };
    let Some((position, run_id)) = decode(&bytes) else {
        return Err(Error::Damaged { path, offset: 0, what: "cursor" });
    };
    let expected = hex(&identity.run_id);
    if run_id != expected {
        return Err(Error::Identity { path, what: "run id", expected, found: run_id.to_owned() });
    }
    Ok(Some(position))
}

/// All cursors by name; a damaged one has no position.
pub(crate) fn all(storage: &dyn Storage) -> Result<Vec<(String, Option<Position>)>> {
    let names = storage.names().map_err(Error::io("list the cursors in", storage.path("")))?;
    let mut cursors = Vec::new();
    for file in names {
        let Some(name) = file.strip_prefix(PREFIX) else { continue };
        let bytes = storage.read(&file).map_err(Error::io("read", storage.path(&file)))?;
        let position = bytes.and_then(|bytes| decode(&bytes).map(|(position, _)| position));
        cursors.push((name.to_owned(), position));
    }
    cursors.sort();
    Ok(cursors)
}

/// The furthest position that any cursor names.
pub(crate) fn newest(storage: &dyn Storage) -> Result<u64> {
    Ok(all(storage)?
        .into_iter()
        .filter_map(|(_, position)| position)
        .map(|position| position.0)
        .max()
        .unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One byte in so many is flipped. Miri has no time for more.
    const APART: usize = if cfg!(miri) { 7 } else { 1 };

    #[test]
    fn every_flipped_byte_of_a_cursor_is_noticed() {
        let identity = Identity { run_id: [3; 16], model: "policy".into(), tokenizer_digest: [0; 32] };
        let text = encode(Position(42), &identity);
        assert_eq!(decode(text.as_bytes()), Some((Position(42), hex(&[3; 16]).as_str())));
        for at in (0..text.len()).step_by(APART) {
            for bit in 0..8 {
                let mut bad = text.clone().into_bytes();
                bad[at] ^= 1 << bit;
                assert_eq!(decode(&bad), None, "byte {at} bit {bit}");
            }
            assert_eq!(decode(&text.as_bytes()[..at]), None, "cut at {at}");
        }
    }
}
