//! Decoding on a machine: reads the tokens here, and has everything else done there. Nothing is written
//! before all of it is known to be right.

use super::Result;
use super::encode::{CLASSES_BYTES, TABLE_BYTES};
use super::machine::{
    Arguments, Grid, HostRoom, Kernel, Machine, Memory, Placed, Room, finished, keys_on, numbers,
};
use crate::bits::ByteReader;
use crate::coder::corrupt;
use crate::digest::{Digest, DigestTable};
use crate::element::{BLOCK_ELEMENTS, Element};
use crate::entropy;
use crate::error::Error;
use crate::payload::{Header, Token, block_elements, expect_result};
use crate::table::Table;

const WHAT: &str = "delta payload";

/// `struct Decode` of `kernels/decode.cu`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Decode {
    base: u64,
    elements: u64,
    payload: u64,
    tasks: u64,
    count: u64,
    tables: u64,
    classes: u64,
    members: u64,
    spans: u64,
    entries: u64,
    keys: u64,
    digests: u64,
    status: u64,
    check: u64,
    expected: u64,
}

// SAFETY: 15 numbers of 64 bits, in the order of the `struct`.
unsafe impl Arguments for Decode {}

/// One block that is not the base's: `struct Task`, 7 numbers of 64 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Task {
    block: u64,
    offset: u64,
    bytes: u64,
    entries: u64,
    room: u64,
    table: u64,
    kind: u64,
}

const CHANGES: u64 = 0;
const WHOLE: u64 = 1;

/// Bytes that kernels may look at past the end of a payload.
const PAST: usize = 128;
/// Blocks that a thread block reads, a warp each: `PARSERS` of `kernels/parse.cu`.
const PARSERS: usize = 4;

/// Memory of a decoder; it grows to what the largest payload needs.
#[derive(Default)]
pub(super) struct State {
    keys: Option<Memory>,
    payload: Room,
    plan: Room,
    work: Room,
    entries: Room,
    results: Room,
    host_plan: HostRoom,
    tokens: Tokens,
    host_results: HostRoom,
}

impl State {
    /// Turns `base` into the result of `payload`, and its digests with it. Returns how many elements changed.
    pub(super) fn apply(
        &mut self,
        machine: &dyn Machine,
        element: Element,
        base: Placed,
        digests: &mut DigestTable,
        payload: &[u8],
    ) -> Result<u64> {
        let applied = self.queue(machine, element, base, digests, payload);
        finished(machine, applied)
    }

    fn queue(
        &mut self,
        machine: &dyn Machine,
        element: Element,
        base: Placed,
        digests: &mut DigestTable,
        payload: &[u8],
    ) -> Result<u64> {
        let elements = element.count("base", base.bytes)?;
        digests.expect_elements(elements)?;
        let mut reader = ByteReader::new(payload, WHAT);
        let Some(result) = Header::of_delta(&mut reader, element, digests.total())? else {
            return Ok(reader.finish().map(|()| 0)?);
        };
        let room = payload.len().next_multiple_of(16) + PAST;
        let address = self.payload.address(machine, room)?;
        // SAFETY: the room was made for this payload, which lives until the wait in `apply`.
        unsafe { machine.upload(address, payload)? };
        // Out of the state and back, so that its memory is used again.
        let mut plan = std::mem::take(&mut self.tokens);
        let applied = plan
            .read(reader, element, elements, payload.len())
            .map_err(super::Error::from)
            .and_then(|()| self.run(machine, element, base, digests, payload, &plan, result));
        self.tokens = plan;
        applied
    }

    /// Has the plan carried out, and waits.
    #[allow(clippy::too_many_arguments, reason = "what `apply` was given, and what was made of it")]
    fn run(
        &mut self,
        machine: &dyn Machine,
        element: Element,
        base: Placed,
        digests: &mut DigestTable,
        payload: &[u8],
        plan: &Tokens,
        result: u64,
    ) -> Result<u64> {
        let elements = base.bytes / element.size();
        let check = digests.total();
        if plan.tasks.is_empty() {
            return Ok(expect_result(result, check.check()).map(|()| 0)?);
        }
        let mut arguments = self.arguments(machine, element, plan)?;
        arguments.base = base.address;
        arguments.elements = elements as u64;
        arguments.check = check.check();
        arguments.expected = result;
        let host_plan = self.host_plan.bytes(machine, plan.bytes())?;
        plan.write(host_plan);
        let results = self.host_results.bytes(machine, 32 + 16 * plan.tasks.len())?;
        // SAFETY: the rooms were made for this payload; what is copied lives until the wait below, and
        // `results` is looked at after it.
        unsafe {
            if !plan.extra.is_empty() {
                machine.upload(arguments.payload, payload)?;
                machine.upload(arguments.payload + plan.payload_bytes as u64, &plan.extra)?;
            }
            machine.upload(arguments.tasks, host_plan)?;
            machine.clear(arguments.status, 32)?;
            kernels(machine, element, &arguments)?;
            machine.download(arguments.status, results)?;
        }
        machine.finish()?;
        let mut status = numbers(&results[..32]).map(u64::from_le_bytes);
        let mut next = || status.next().unwrap_or(0);
        let (sum, changed, failed) = (next(), next(), next());
        if let Some(why) = failure(failed) {
            return Err(corrupt(why).into());
        }
        expect_result(result, check.check().wrapping_add(sum))?;
        let changes = numbers::<16>(&results[32..]).map(Digest::from_bytes);
        for (task, change) in plan.tasks.iter().zip(changes) {
            if let Some(digest) = digests.blocks_mut().get_mut(task.block as usize) {
                *digest += change;
            }
        }
        Ok(changed)
    }

    /// Makes room for all that the kernels need.
    fn arguments(&mut self, machine: &dyn Machine, element: Element, plan: &Tokens) -> Result<Decode> {
        let tasks = plan.tasks.len();
        let keys = keys_on(machine, &mut self.keys)?;
        let wide = if element.size() == 4 { 8 } else { 4 };
        if !plan.extra.is_empty() {
            // The room may have to grow, and the payload is on its way there.
            machine.finish()?;
        }
        let payload = self.payload.address(machine, plan.payload_bytes + plan.extra.len() + PAST)?;
        let tasks_at = self.plan.address(machine, plan.bytes())?;
        let members = self.work.address(machine, tasks * 16 * (4 + 12))?;
        let status = self.results.address(machine, 32 + 16 * tasks)?;
        Ok(Decode {
            payload,
            tasks: tasks_at,
            count: tasks as u64,
            tables: tasks_at + (tasks * 56) as u64,
            classes: plan.tables.iter().any(|table| !table.is_flat()).into(),
            members,
            spans: members + (tasks * 16 * 4) as u64,
            entries: self.entries.address(machine, plan.room as usize * wide)?,
            keys,
            digests: status + 32,
            status,
            ..Decode::default()
        })
    }
}

/// # Safety
/// As for [`Machine::launch`].
unsafe fn kernels(machine: &dyn Machine, element: Element, arguments: &Decode) -> Result<()> {
    let tasks = arguments.count as usize;
    let shared = if arguments.classes == 1 { CLASSES_BYTES } else { 0 };
    let parse = Grid { threads: 32 * PARSERS as u32, ..Grid::of(tasks.div_ceil(PARSERS)) };
    // SAFETY: the caller's promise.
    unsafe {
        if arguments.classes == 1 {
            machine.launch(element, Kernel::Classify, Grid::of(tasks), arguments)?;
        }
        machine.launch(element, Kernel::Parse, parse, arguments)?;
        machine.launch(element, Kernel::Resolve, Grid { shared, ..Grid::of(tasks) }, arguments)?;
        machine.launch(element, Kernel::Apply, Grid::of(tasks), arguments)
    }
}

/// What the number of a kernel's error means.
fn failure(number: u64) -> Option<&'static str> {
    match number {
        0 => None,
        1 => Some("a position lies beyond the block"),
        2 => Some("bits end too early"),
        3 => Some("padding is not zero"),
        _ => Some("bytes follow the end"),
    }
}

/// The tokens of a payload.
#[derive(Default)]
struct Tokens {
    tasks: Vec<Task>,
    tables: Vec<Table>,
    /// Blocks that were decoded here; they follow the payload, from the next multiple of 16.
    extra: Vec<u8>,
    /// Room for the changes of all blocks.
    room: u64,
    /// Of the payload, up to a multiple of 16.
    payload_bytes: usize,
}

impl Tokens {
    /// Reads the body of a payload. After this, the tokens are known to cover the tensor's blocks, once each,
    /// and to lie within the payload.
    fn read(
        &mut self,
        mut reader: ByteReader<'_>,
        element: Element,
        elements: usize,
        payload_bytes: usize,
    ) -> crate::error::Result<()> {
        let plan = self;
        plan.tasks.clear();
        plan.tables.clear();
        plan.extra.clear();
        plan.room = 0;
        plan.payload_bytes = payload_bytes.next_multiple_of(16);
        let blocks = elements.div_ceil(BLOCK_ELEMENTS);
        let mut block = 0;
        while block < blocks {
            let left = (blocks - block) as u64;
            match Token::read(&mut reader)? {
                Token::Same(run) | Token::Raw(run) if run > left => {
                    return Err(reader.corrupt("more blocks than the tensor has"));
                }
                Token::Same(run) => block += run as usize,
                Token::Raw(run) => {
                    for _ in 0..run {
                        let offset = reader.at();
                        reader.take(block_elements(elements, block) * element.size())?;
                        plan.whole(block, offset as u64);
                        block += 1;
                    }
                }
                Token::Changes(bytes) => {
                    let offset = reader.at();
                    let bytes = reader.take_long(bytes)?.len();
                    expect_tokens(reader.rest(), bytes);
                    plan.changes(block, block_elements(elements, block), offset, bytes)?;
                    block += 1;
                }
                Token::Entropy(bytes) => {
                    let start = plan.extra.len();
                    let coded = reader.take_long(bytes)?;
                    plan.extra.resize(start + block_elements(elements, block) * element.size(), 0);
                    entropy::decode(element, coded, &mut plan.extra[start..])?;
                    plan.whole(block, (plan.payload_bytes + start) as u64);
                    block += 1;
                }
                Token::Table(bytes) => {
                    let offset = reader.at();
                    plan.tables.push(Table::read(element, reader.take_long(bytes)?, offset)?);
                }
            }
        }
        reader.finish()
    }

    fn whole(&mut self, block: usize, offset: u64) {
        let task = Task { block: block as u64, offset, bytes: 0, entries: 0, room: 0, table: 0, kind: WHOLE };
        self.tasks.push(task);
    }

    fn changes(
        &mut self,
        block: usize,
        elements: usize,
        offset: usize,
        bytes: usize,
    ) -> crate::error::Result<()> {
        let Some(table) = self.tables.last() else {
            return Err(Error::Corrupt {
                what: "change block",
                offset,
                why: "no table before the first block",
            });
        };
        // A change has a bit for its sign, and one for its mark unless its class is inverted. A large one
        // costs two bits more in the list that is kept while they are read.
        let least = if table.classes().iter().any(|class| class.inverted) { 1 } else { 2 };
        let room = (2 * elements as u64).min(bytes as u64 * 8 / least);
        self.tasks.push(Task {
            block: block as u64,
            offset: offset as u64,
            bytes: bytes as u64,
            entries: self.room,
            room,
            table: self.tables.len() as u64 - 1,
            kind: CHANGES,
        });
        self.room += room;
        Ok(())
    }

    fn bytes(&self) -> usize {
        self.tasks.len() * 56 + self.tables.len() * TABLE_BYTES
    }

    /// Tasks, then tables, as kernels read them, into so many bytes.
    fn write(&self, out: &mut [u8]) {
        let (tasks, tables) = out.split_at_mut(self.tasks.len() * 56);
        for (task, out) in self.tasks.iter().zip(tasks.as_chunks_mut::<56>().0) {
            let Task { block, offset, bytes, entries, room, table, kind } = *task;
            let fields = [block, offset, bytes, entries, room, table, kind];
            fields.iter().zip(out.as_chunks_mut().0).for_each(|(field, out)| *out = field.to_le_bytes());
        }
        for (table, out) in self.tables.iter().zip(tables.as_chunks_mut::<TABLE_BYTES>().0) {
            let classes = table.classes();
            let packed = (0..16).map(|index| {
                classes.get(index).map_or(0, |class| {
                    class.run | class.large_run << 8 | class.rice << 16 | u32::from(class.inverted) << 24
                })
            });
            let fields = [table.first, classes.len() as u32].into_iter().chain(packed);
            fields.zip(out.as_chunks_mut().0).for_each(|(field, out)| *out = field.to_le_bytes());
        }
    }
}

/// Has the processor load where the token after the next three is likely to be, if blocks go on to take
/// `bytes` bytes. Each token says where the next one is. Waiting for memory at each took longer than decoding
/// the blocks.
fn expect_tokens(rest: &[u8], bytes: usize) {
    #[cfg(target_arch = "x86_64")]
    for line in 0..4 {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        if let Some(byte) = rest.get((3 * (bytes + 2) + 64 * line).saturating_sub(96)) {
            // SAFETY: part of every x86-64 processor, and no more than a hint.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(byte).cast()) };
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (rest, bytes);
}
