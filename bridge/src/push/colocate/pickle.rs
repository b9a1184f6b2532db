//! The few opcodes of Python's pickle, protocol 4, that a bucket needs (`Lib/pickletools.py` describes all of
//! them).

use std::collections::BTreeMap;

/// A class, a function or a constant: its module, its name.
pub(super) type Global = (&'static str, &'static str);

/// A pickle that is being written: each call pushes one value onto the reader's stack, or makes one of those
/// on top of it.
#[derive(Debug)]
pub(super) struct Pickle {
    bytes: Vec<u8>,
    /// Places in the reader's memo of the globals that were pushed before.
    globals: BTreeMap<Global, u32>,
}

impl Pickle {
    pub(super) fn new() -> Self {
        Self { bytes: vec![0x80, 4], globals: BTreeMap::new() }
    }

    pub(super) fn text(&mut self, text: &str) {
        // BINUNICODE: UTF-8 with its length. No name has 4 GiB.
        self.op(b'X', &(text.len() as u32).to_le_bytes());
        self.bytes.extend_from_slice(text.as_bytes());
    }

    pub(super) fn blob(&mut self, bytes: &[u8]) {
        // BINBYTES8.
        self.op(0x8e, &(bytes.len() as u64).to_le_bytes());
        self.bytes.extend_from_slice(bytes);
    }

    pub(super) fn number(&mut self, number: u64) {
        match i32::try_from(number) {
            // BININT.
            Ok(small) => self.op(b'J', &small.to_le_bytes()),
            Err(_) => {
                // LONG1: the length, then two's complement, for which a number of 64 bits needs a ninth byte.
                self.op(0x8a, &[9]);
                self.bytes.extend_from_slice(&number.to_le_bytes());
                self.bytes.push(0);
            }
        }
    }

    pub(super) fn no(&mut self) {
        // NEWFALSE.
        self.op(0x89, &[]);
    }

    pub(super) fn global(&mut self, global: Global) {
        if let Some(place) = self.globals.get(&global) {
            // LONG_BINGET.
            let place = place.to_le_bytes();
            return self.op(b'j', &place);
        }
        self.text(global.0);
        self.text(global.1);
        // STACK_GLOBAL, MEMOIZE.
        self.op(0x93, &[0x94]);
        let place = self.globals.len() as u32;
        self.globals.insert(global, place);
    }

    pub(super) fn tuple(&mut self, items: impl FnOnce(&mut Self)) {
        // MARK … TUPLE.
        self.op(b'(', &[]);
        items(self);
        self.op(b't', &[]);
    }

    pub(super) fn list(&mut self, items: impl FnOnce(&mut Self)) {
        // EMPTY_LIST, MARK … APPENDS.
        self.op(b']', b"(");
        items(self);
        self.op(b'e', &[]);
    }

    /// A dictionary: keys and values in turn.
    pub(super) fn dict(&mut self, items: impl FnOnce(&mut Self)) {
        // EMPTY_DICT, MARK … SETITEMS.
        self.op(b'}', b"(");
        items(self);
        self.op(b'u', &[]);
    }

    /// What a function makes of arguments.
    pub(super) fn call(&mut self, function: Global, arguments: impl FnOnce(&mut Self)) {
        self.global(function);
        self.tuple(arguments);
        // REDUCE.
        self.op(b'R', &[]);
    }

    /// An object with these attributes, whose class is not called.
    pub(super) fn object(&mut self, class: Global, attributes: impl FnOnce(&mut Self)) {
        self.global(class);
        // EMPTY_TUPLE, NEWOBJ … BUILD.
        self.op(b')', &[0x81]);
        self.dict(attributes);
        self.op(b'b', &[]);
    }

    /// The pickle of the value on top.
    pub(super) fn finish(mut self) -> Vec<u8> {
        self.op(b'.', &[]);
        self.bytes
    }

    fn op(&mut self, code: u8, arguments: &[u8]) {
        self.bytes.push(code);
        self.bytes.extend_from_slice(arguments);
    }
}
