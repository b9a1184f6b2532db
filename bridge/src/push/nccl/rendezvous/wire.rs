//! The wire format of torch's TCPStore, as torch 2.11 and 2.14 speak it: one byte of type, then its fields.
//! Integers are little-endian; a key or a value is a `u64` length and its bytes; a list is a `u64` count and
//! its members.

/// What a client sends first.
pub(super) const MAGIC: u32 = 0x3C85_F7CE;

/// Longest key, in bytes. torch's are the names of groups with a few words around them.
const KEY_BYTES_MAX: u64 = 4 << 10;
/// Longest value, in bytes. An NCCL id has 128, a gloo rank's addresses some hundred.
pub(super) const VALUE_BYTES_MAX: u64 = 1 << 20;
/// Most members of a list.
const LIST_MAX: u64 = 4 << 10;
/// Longest request: what is read of a client before it has said something whole.
pub(super) const REQUEST_BYTES_MAX: usize = 4 << 20;

/// What a client asks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Request {
    Validate(u32),
    Set { key: Vec<u8>, value: Vec<u8> },
    CompareSet { key: Vec<u8>, expected: Vec<u8>, desired: Vec<u8> },
    Get(Vec<u8>),
    Add { key: Vec<u8>, amount: i64 },
    Check(Vec<Vec<u8>>),
    Wait(Vec<Vec<u8>>),
    NumKeys,
    Delete(Vec<u8>),
    Append { key: Vec<u8>, value: Vec<u8> },
    MultiGet(Vec<Vec<u8>>),
    MultiSet(Vec<(Vec<u8>, Vec<u8>)>),
    CancelWait,
    Ping(u32),
}

/// Why a client's connection is closed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum Violation {
    #[error("its first request should be torch's TCPStore greeting, found {0:#x}")]
    Greeting(u32),
    #[error("request type {0} is none that a weight-update group needs")]
    Unknown(u8),
    #[error("{what} of {found}, at most {limit} expected")]
    TooLarge { what: &'static str, limit: u64, found: u64 },
    #[error("it asks for key {0:?}, which nobody set")]
    NoSuchKey(String),
    #[error("key {0:?} does not count: {1}")]
    NotACounter(String, &'static str),
    #[error("it asks for something else while it waits for keys")]
    Waiting,
    #[error("it does not read what it is sent")]
    NotReading,
}

/// The first request in `bytes` and its length; `None` while more bytes are needed.
pub(super) fn decode(bytes: &[u8]) -> Result<Option<(Request, usize)>, Violation> {
    let mut reader = Reader { bytes, at: 0 };
    let request = match reader.request() {
        Ok(request) => request,
        Err(Stop::More) if bytes.len() < REQUEST_BYTES_MAX => return Ok(None),
        Err(Stop::More) => {
            let (limit, found) = (REQUEST_BYTES_MAX as u64, bytes.len() as u64);
            return Err(Violation::TooLarge { what: "a request's bytes", limit, found });
        }
        Err(Stop::Bad(violation)) => return Err(violation),
    };
    Ok(Some((request, reader.at)))
}

/// A value as a reply carries it.
pub(super) fn value(bytes: &[u8]) -> Vec<u8> {
    [&(bytes.len() as u64).to_le_bytes(), bytes].concat()
}

enum Stop {
    /// The request goes on after these bytes.
    More,
    Bad(Violation),
}

struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn request(&mut self) -> Result<Request, Stop> {
        let [kind] = self.array()?;
        Ok(match kind {
            0 => Request::Validate(u32::from_le_bytes(self.array()?)),
            1 => Request::Set { key: self.key()?, value: self.value()? },
            2 => Request::CompareSet { key: self.key()?, expected: self.value()?, desired: self.value()? },
            3 => Request::Get(self.key()?),
            4 => Request::Add { key: self.key()?, amount: i64::from_le_bytes(self.array()?) },
            5 => Request::Check(self.list(Self::key)?),
            6 => Request::Wait(self.list(Self::key)?),
            7 => Request::NumKeys,
            8 => Request::Delete(self.key()?),
            9 => Request::Append { key: self.key()?, value: self.value()? },
            10 => Request::MultiGet(self.list(Self::key)?),
            11 => Request::MultiSet(self.list(|reader| Ok((reader.key()?, reader.value()?)))?),
            12 => Request::CancelWait,
            13 => Request::Ping(u32::from_le_bytes(self.array()?)),
            other => return Err(Stop::Bad(Violation::Unknown(other))),
        })
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Stop> {
        let array = self.bytes[self.at..].first_chunk().ok_or(Stop::More)?;
        self.at += N;
        Ok(*array)
    }

    /// A count that is refused before anything is taken because of it.
    fn count(&mut self, what: &'static str, limit: u64) -> Result<usize, Stop> {
        let found = u64::from_le_bytes(self.array()?);
        if found > limit {
            return Err(Stop::Bad(Violation::TooLarge { what, limit, found }));
        }
        // At most a few MiB, by the limits above.
        Ok(found as usize)
    }

    fn bytes(&mut self, what: &'static str, limit: u64) -> Result<Vec<u8>, Stop> {
        let length = self.count(what, limit)?;
        let bytes = self.bytes[self.at..].get(..length).ok_or(Stop::More)?;
        self.at += length;
        Ok(bytes.to_vec())
    }

    fn key(&mut self) -> Result<Vec<u8>, Stop> {
        self.bytes("a key's bytes", KEY_BYTES_MAX)
    }

    fn value(&mut self) -> Result<Vec<u8>, Stop> {
        self.bytes("a value's bytes", VALUE_BYTES_MAX)
    }

    fn list<T>(&mut self, member: impl Fn(&mut Self) -> Result<T, Stop>) -> Result<Vec<T>, Stop> {
        let count = self.count("a list's members", LIST_MAX)?;
        (0..count).map(|_| member(self)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(bytes: &str) -> Vec<u8> {
        value(bytes.as_bytes())
    }

    /// What SGLang's rank was seen to send, byte for byte.
    #[test]
    fn a_recorded_client_is_understood() {
        let greeting = [0x00, 0xce, 0xf7, 0x85, 0x3c, 0x0d, 0x39, 0x30, 0, 0];
        assert_eq!(decode(&greeting), Ok(Some((Request::Validate(MAGIC), 5))));
        assert_eq!(decode(&greeting[5..]), Ok(Some((Request::Ping(12345), 5))));
        let add = [&[4][..], &text("init/"), &1i64.to_le_bytes()].concat();
        assert_eq!(decode(&add), Ok(Some((Request::Add { key: b"init/".to_vec(), amount: 1 }, add.len()))));
        let wait = [&[6][..], &1u64.to_le_bytes(), &text("/G/G//cuda//0")].concat();
        assert_eq!(decode(&wait), Ok(Some((Request::Wait(vec![b"/G/G//cuda//0".to_vec()]), wait.len()))));
    }

    #[test]
    fn every_prefix_asks_for_more() {
        let requests = [
            [&[1][..], &text("k"), &text("value")].concat(),
            [&[2][..], &text("k"), &text("old"), &text("new")].concat(),
            [&[4][..], &text("k"), &5i64.to_le_bytes()].concat(),
            [&[11][..], &2u64.to_le_bytes(), &text("a"), &text("1"), &text("b"), &text("2")].concat(),
            [&[10][..], &2u64.to_le_bytes(), &text("a"), &text("b")].concat(),
        ];
        for request in requests {
            for end in 0..request.len() {
                assert_eq!(decode(&request[..end]), Ok(None), "{end} of {request:?}");
            }
            let followed = [&request[..], &[7]].concat();
            assert_eq!(decode(&followed).unwrap().unwrap().1, request.len());
        }
    }

    #[test]
    fn hostile_lengths_are_refused_before_they_are_read() {
        let huge = u64::MAX.to_le_bytes();
        for bytes in [
            [&[3][..], &huge].concat(),
            [&[1][..], &text("k"), &huge].concat(),
            [&[5][..], &huge].concat(),
            [&[6][..], &(LIST_MAX + 1).to_le_bytes()].concat(),
            [&[3][..], &(KEY_BYTES_MAX + 1).to_le_bytes()].concat(),
        ] {
            assert!(matches!(decode(&bytes), Err(Violation::TooLarge { .. })), "{bytes:?}");
        }
        assert_eq!(decode(b"GET / HTTP/1.1\r\n"), Err(Violation::Unknown(b'G')));
        // Small members that add up.
        let list = [&[6][..], &LIST_MAX.to_le_bytes(), &vec![0; REQUEST_BYTES_MAX]].concat();
        assert!(decode(&list).is_ok(), "empty keys end before the limit");
        let mut list = [&[6][..], &LIST_MAX.to_le_bytes()].concat();
        (0..2000).for_each(|_| list.extend(value(&[0; 4000])));
        assert!(matches!(decode(&list), Err(Violation::TooLarge { what: "a request's bytes", .. })));
    }

    /// Whatever comes, the answer is a request, a violation or the wish for more.
    #[test]
    fn random_bytes_never_panic() {
        let mut state = 1u64;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as u8
        };
        for _ in 0..20_000 {
            let length = usize::from(next() % 64);
            let mut bytes: Vec<u8> = (0..length).map(|_| if next() < 100 { 0 } else { next() }).collect();
            if let Some(first) = bytes.first_mut() {
                *first %= 16;
            }
            if let Ok(Some((_, used))) = decode(&bytes) {
                assert!(used <= bytes.len());
            }
        }
    }
}
