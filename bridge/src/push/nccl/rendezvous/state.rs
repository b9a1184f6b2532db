//! What the store holds and who waits for what: a function from requests to replies, without a socket.

use std::collections::BTreeMap;

use super::wire::{MAGIC, Request, VALUE_BYTES_MAX, Violation, value};

/// Most bytes that all keys and values may have together.
const BYTES_MAX: usize = 64 << 20;
/// Most keys.
const KEYS_MAX: usize = 64 << 10;
/// Most bytes of values that one request is answered with: a request can name a value often.
const REPLY_BYTES_MAX: usize = 2 << 20;

/// A client, by the number of its connection.
pub(super) type Client = u64;

/// Bytes to be sent to a client.
pub(super) type Reply = (Client, Vec<u8>);

/// Keys, values, and the clients that wait for keys.
#[derive(Debug, Default)]
pub(super) struct Table {
    values: BTreeMap<Vec<u8>, Vec<u8>>,
    bytes: usize,
    /// The keys that a client still misses.
    waiting: BTreeMap<Client, Vec<Vec<u8>>>,
    greeted: std::collections::BTreeSet<Client>,
}

/// Refuses more than a limit.
fn within(what: &'static str, limit: usize, found: usize) -> Result<(), Violation> {
    let (most, many) = (limit as u64, found as u64);
    if found > limit { Err(Violation::TooLarge { what, limit: most, found: many }) } else { Ok(()) }
}

impl Table {
    /// Does what a client asks: the replies, to it and to those it wakes.
    pub(super) fn handle(&mut self, client: Client, request: Request) -> Result<Vec<Reply>, Violation> {
        if !self.greeted.contains(&client) {
            return self.greet(client, &request);
        }
        if self.waiting.contains_key(&client) && request != Request::CancelWait {
            return Err(Violation::Waiting);
        }
        self.answer(client, request)
    }

    fn greet(&mut self, client: Client, request: &Request) -> Result<Vec<Reply>, Violation> {
        match request {
            Request::Validate(MAGIC) => {
                self.greeted.insert(client);
                Ok(Vec::new())
            }
            Request::Validate(other) => Err(Violation::Greeting(*other)),
            _ => Err(Violation::Greeting(0)),
        }
    }

    /// Does what a client asks that has greeted and waits for nothing.
    fn answer(&mut self, client: Client, request: Request) -> Result<Vec<Reply>, Violation> {
        let reply = |bytes: Vec<u8>| Ok(vec![(client, bytes)]);
        match request {
            Request::Validate(MAGIC) => Ok(Vec::new()),
            Request::Validate(other) => Err(Violation::Greeting(other)),
            Request::Ping(nonce) => reply(nonce.to_le_bytes().to_vec()),
            Request::Set { key, value } => self.set(key, value),
            Request::MultiSet(pairs) => {
                let mut woken = Vec::new();
                for (key, value) in pairs {
                    woken.extend(self.set(key, value)?);
                }
                Ok(woken)
            }
            Request::Append { key, value: more } => {
                let before = self.values.get(&key).map_or(&[][..], Vec::as_slice);
                within("a value's bytes", VALUE_BYTES_MAX as usize, before.len() + more.len())?;
                let whole = [before, &more].concat();
                self.set(key, whole)
            }
            Request::CompareSet { key, expected, desired } => {
                self.compare_set(client, key, expected, desired)
            }
            Request::Add { key, amount } => self.add(client, key, amount),
            Request::Get(key) => reply(value(self.get(&key)?)),
            Request::MultiGet(keys) => {
                let values = keys.iter().map(|key| self.get(key)).collect::<Result<Vec<_>, _>>()?;
                within("a reply", REPLY_BYTES_MAX, values.iter().map(|value| value.len()).sum())?;
                reply(values.into_iter().flat_map(value).collect())
            }
            Request::Check(keys) => reply(vec![u8::from(!self.missing(keys).is_empty())]),
            Request::Wait(keys) => {
                let missing = self.missing(keys);
                if missing.is_empty() {
                    return reply(vec![0]);
                }
                self.waiting.insert(client, missing);
                Ok(Vec::new())
            }
            Request::CancelWait => {
                self.waiting.remove(&client);
                reply(vec![1])
            }
            Request::NumKeys => reply((self.values.len() as u64).to_le_bytes().to_vec()),
            Request::Delete(key) => {
                let removed = self.values.remove_entry(&key);
                self.bytes -= removed.as_ref().map_or(0, |(key, value)| key.len() + value.len());
                reply(i64::from(removed.is_some()).to_le_bytes().to_vec())
            }
        }
    }

    /// Sets a key: the replies to those who waited for it.
    pub(super) fn set(&mut self, key: Vec<u8>, value: Vec<u8>) -> Result<Vec<Reply>, Violation> {
        let replaced = self.values.get(&key).map(|old| key.len() + old.len());
        let bytes = self.bytes - replaced.unwrap_or(0) + key.len() + value.len();
        let keys = self.values.len() + usize::from(replaced.is_none());
        within("all keys and values", BYTES_MAX, bytes)?;
        within("the keys", KEYS_MAX, keys)?;
        self.bytes = bytes;
        let mut woken = Vec::new();
        self.waiting.retain(|client, missing| {
            missing.retain(|wanted| *wanted != key);
            if missing.is_empty() {
                woken.push((*client, vec![0]));
            }
            !missing.is_empty()
        });
        self.values.insert(key, value);
        Ok(woken)
    }

    /// Forgets a client whose connection is gone.
    pub(super) fn forget(&mut self, client: Client) {
        self.waiting.remove(&client);
        self.greeted.remove(&client);
    }

    /// The keys that clients wait for, each once.
    pub(super) fn waited_for(&self) -> Vec<String> {
        let keys: std::collections::BTreeSet<_> = self.waiting.values().flatten().collect();
        keys.into_iter().map(|key| String::from_utf8_lossy(key).into_owned()).collect()
    }

    fn get(&self, key: &[u8]) -> Result<&[u8], Violation> {
        let missing = || Violation::NoSuchKey(String::from_utf8_lossy(key).into_owned());
        self.values.get(key).map(Vec::as_slice).ok_or_else(missing)
    }

    fn missing(&self, mut keys: Vec<Vec<u8>>) -> Vec<Vec<u8>> {
        keys.retain(|key| !self.values.contains_key(key));
        keys
    }

    /// Counters are decimal text, as torch keeps them, so that a GET of one reads.
    fn add(&mut self, client: Client, key: Vec<u8>, amount: i64) -> Result<Vec<Reply>, Violation> {
        let bad = |why| Violation::NotACounter(String::from_utf8_lossy(&key).into_owned(), why);
        let before = match self.values.get(&key) {
            None => 0,
            Some(text) => std::str::from_utf8(text)
                .ok()
                .and_then(|text| text.parse::<i64>().ok())
                .ok_or_else(|| bad("its value is no number"))?,
        };
        let after = before.checked_add(amount).ok_or_else(|| bad("the sum exceeds 64 bits"))?;
        let mut replies = self.set(key, after.to_string().into_bytes())?;
        replies.push((client, after.to_le_bytes().to_vec()));
        Ok(replies)
    }

    /// torch's rule: a key that is not there takes the desired value only if nothing was expected, and what
    /// was expected is then replied.
    fn compare_set(
        &mut self,
        client: Client,
        key: Vec<u8>,
        expected: Vec<u8>,
        desired: Vec<u8>,
    ) -> Result<Vec<Reply>, Violation> {
        let (set, now) = match self.values.get(&key) {
            None if expected.is_empty() => (true, desired),
            None => (false, expected),
            Some(found) if *found == expected => (true, desired),
            Some(found) => (false, found.clone()),
        };
        let reply = (client, value(&now));
        let mut replies = if set { self.set(key, now)? } else { Vec::new() };
        replies.push(reply);
        Ok(replies)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn greeted(clients: &[Client]) -> Table {
        let mut state = Table::default();
        for client in clients {
            assert_eq!(state.handle(*client, Request::Validate(MAGIC)), Ok(vec![]));
        }
        state
    }

    fn key(name: &str) -> Vec<u8> {
        name.as_bytes().to_vec()
    }

    #[test]
    fn who_waits_is_woken_once_by_the_last_key() {
        let mut state = greeted(&[1, 2, 3]);
        assert_eq!(state.handle(1, Request::Wait(vec![key("a"), key("b")])), Ok(vec![]));
        assert_eq!(state.handle(2, Request::Wait(vec![key("b")])), Ok(vec![]));
        assert_eq!(state.waited_for(), ["a", "b"]);
        assert_eq!(state.set(key("a"), vec![]), Ok(vec![]));
        let set = Request::Set { key: key("b"), value: key("v") };
        assert_eq!(state.handle(3, set.clone()), Ok(vec![(1, vec![0]), (2, vec![0])]));
        assert_eq!(state.handle(3, set), Ok(vec![]));
        assert_eq!(state.handle(1, Request::Get(key("b"))), Ok(vec![(1, value(b"v"))]));
    }

    #[test]
    fn one_request_is_not_answered_with_gigabytes() {
        let mut state = greeted(&[1]);
        let long = vec![7; VALUE_BYTES_MAX as usize];
        assert_eq!(state.set(key("a"), long.clone()), Ok(vec![]));
        let many = |times| Request::MultiGet(vec![key("a"); times]);
        let found = 3 * long.len() as u64;
        let limit = REPLY_BYTES_MAX as u64;
        assert_eq!(state.handle(1, many(3)), Err(Violation::TooLarge { what: "a reply", limit, found }));
        assert_eq!(state.handle(1, many(2)).unwrap()[0].1.len(), 2 * value(&long).len());
        let longer = Request::Append { key: key("a"), value: vec![7] };
        assert!(matches!(state.handle(1, longer), Err(Violation::TooLarge { what: "a value's bytes", .. })));
    }

    #[test]
    fn a_wait_is_cancelled_or_forgotten() {
        let mut state = greeted(&[1, 2]);
        state.handle(1, Request::Wait(vec![key("a")])).unwrap();
        state.handle(2, Request::Wait(vec![key("a")])).unwrap();
        assert_eq!(state.handle(1, Request::NumKeys), Err(Violation::Waiting));
        assert_eq!(state.handle(1, Request::CancelWait), Ok(vec![(1, vec![1])]));
        state.forget(2);
        assert_eq!(state.set(key("a"), vec![]), Ok(vec![]));
    }

    #[test]
    fn counters_are_decimal_text() {
        let mut state = greeted(&[1]);
        let add = |amount| Request::Add { key: key("n"), amount };
        assert_eq!(state.handle(1, add(2)), Ok(vec![(1, 2i64.to_le_bytes().to_vec())]));
        assert_eq!(state.handle(1, add(-5)), Ok(vec![(1, (-3i64).to_le_bytes().to_vec())]));
        assert_eq!(state.handle(1, Request::Get(key("n"))), Ok(vec![(1, value(b"-3"))]));
        assert!(matches!(state.handle(1, add(i64::MIN)), Err(Violation::NotACounter(..))));
        state.set(key("n"), key("x")).unwrap();
        assert!(matches!(state.handle(1, add(1)), Err(Violation::NotACounter(..))));
    }

    #[test]
    fn compare_set_follows_torch() {
        let mut state = greeted(&[1]);
        let mut ask = |expected: &str, desired: &str| {
            let request =
                Request::CompareSet { key: key("k"), expected: key(expected), desired: key(desired) };
            state.handle(1, request).unwrap().pop().unwrap().1
        };
        assert_eq!(ask("old", "new"), value(b"old"), "not there, and something was expected");
        assert_eq!(ask("", "one"), value(b"one"));
        assert_eq!(ask("other", "two"), value(b"one"));
        assert_eq!(ask("one", "two"), value(b"two"));
    }

    #[test]
    fn what_is_held_is_bounded() {
        let mut state = greeted(&[1]);
        let large = vec![0; 1 << 20];
        let refused = (0..100).find_map(|n| state.set(vec![n], large.clone()).err());
        assert!(matches!(refused, Some(Violation::TooLarge { what: "all keys and values", .. })));
        // Replacing and deleting give the room back.
        (0..63).for_each(|n| drop(state.set(vec![n], vec![]).unwrap()));
        assert_eq!(state.bytes, 63);
        (0..63).for_each(|n| drop(state.handle(1, Request::Delete(vec![n])).unwrap()));
        assert_eq!((state.bytes, state.values.len()), (0, 0));
    }

    #[test]
    fn strangers_are_refused() {
        let mut state = Table::default();
        assert_eq!(state.handle(9, Request::NumKeys), Err(Violation::Greeting(0)));
        assert_eq!(state.handle(9, Request::Validate(7)), Err(Violation::Greeting(7)));
    }
}
