//! Tokens that kernels write, against those of the host, for tensors larger than the twin could look through.

use driftless_testkit::random::Random;

use super::*;
use crate::cuda::tests::{compiled, machine};

const ELEMENT: Element = Element::Bf16;

/// A report on that many blocks, none of which may be better off without its base, and their elements.
fn report(random: &mut Random, blocks: usize) -> (Report, Vec<u8>, usize) {
    let report = Report { blocks, segments: blocks.div_ceil(SEGMENT_BLOCKS) };
    let (mut changed, mut lengths, mut tables) = (Vec::new(), Vec::new(), Vec::new());
    for segment in 0..report.segments {
        // Some segments are like the base's, some have changes everywhere, some here and there.
        let share = [0, 0, 3, 30, 100][random.next() as usize % 5];
        for _ in 0..SEGMENT_BLOCKS.min(blocks - segment * SEGMENT_BLOCKS) {
            let hit = random.next() % 100 < share;
            changed.push(if hit { 1 + random.next() as u32 % 60_000 } else { 0 });
            // What is behind the length of a block that did not change is rubbish.
            let most = if random.next().is_multiple_of(3) { 100 } else { 4000 };
            lengths.push(1 + random.next() as u32 % most);
        }
        let count = 1 + random.next() as usize % 16;
        let inverts = random.next().is_multiple_of(2);
        tables.extend([random.next() as u32 % 240, count as u32]);
        tables.extend((0..16).map(|_| {
            let [run, large_run, rice] = [17, 9, 32].map(|bound| random.next() as u32 % bound);
            run | large_run << 8 | rice << 16 | u32::from(inverts && random.next().is_multiple_of(2)) << 24
        }));
    }
    let mut bytes = vec![0; report.first().end];
    [changed, lengths, tables]
        .iter()
        .flatten()
        .for_each(|number| bytes.extend_from_slice(&number.to_le_bytes()));
    assert_eq!(bytes.len(), report.len());
    (report, bytes, blocks * BLOCK_ELEMENTS - 40_000)
}

/// Text between the blocks, and where these go.
fn by_host(report: &Report, read: &[u8], elements: usize) -> (Vec<u8>, Vec<u64>) {
    let mut plan = Plan::default();
    plan.begin(report.blocks);
    let digests = DigestTable::default();
    let nothing = Placed { address: 0, bytes: 0 };
    let pair =
        Pair { element: ELEMENT, base: nothing, new: nothing, digests: &digests, profile: Profile::Wire };
    let (mut block, mut entropy) = (HostRoom::default(), entropy::Scratch::default());
    let mut fetch = Fetch {
        machine: &machine(),
        pair: &pair,
        elements,
        block: &mut block,
        entropy: &mut entropy,
        coded: Vec::new(),
    };
    plan.blocks(report, read, &mut fetch).unwrap();
    let mut out = vec![0; plan.end];
    for (to, from) in &plan.pieces {
        out[*to..to + from.len()].copy_from_slice(&plan.text[from.clone()]);
    }
    (out, plan.targets)
}

fn by_kernel(report: &Report, read: &[u8], elements: usize, room: usize) -> (Summary, Vec<u8>, Vec<u64>) {
    let machine = machine();
    let memory = |bytes: usize| {
        let memory = machine.allocate(bytes).unwrap();
        let address = memory.address();
        (memory, address)
    };
    let ((_area, area), (_out, out), (_targets, targets)) =
        (memory(report.len()), memory(room), memory(8 * report.blocks));
    let arguments = Encode {
        elements: elements as u64,
        blocks: report.blocks as u64,
        summary: area,
        changed: area + report.changed().start as u64,
        bytes: area + report.bytes().start as u64,
        tables: area + report.tables().start as u64,
        targets,
        header: HEADER_BYTES as u64,
        out,
        ..Encode::default()
    };
    let (mut first, mut written, mut numbered) =
        (vec![0; Summary::BYTES], vec![0; room], vec![0; 8 * report.blocks]);
    // SAFETY: the memory was made for these, and lives until here.
    unsafe {
        machine.upload(area, read).unwrap();
        machine.clear(out, room).unwrap();
        machine.launch(ELEMENT, Kernel::Frame, FRAME, &arguments).unwrap();
        machine.download(area, &mut first).unwrap();
        machine.download(out, &mut written).unwrap();
        machine.download(targets, &mut numbered).unwrap();
    }
    (Summary::read(&first), written, numbers(&numbered).map(u64::from_le_bytes).collect())
}

#[test]
fn kernels_write_the_tokens_that_the_host_would() {
    if !compiled(ELEMENT) {
        return;
    }
    let mut random = Random(77);
    // 256 segments are looked at before the next.
    for blocks in [1, 2, 31, 32, 33, 256 * SEGMENT_BLOCKS, 600 * SEGMENT_BLOCKS + 5] {
        let (report, mut read, elements) = report(&mut random, blocks);
        let (host, targets) = by_host(&report, &read, elements);
        let code: usize =
            numbers(&read[report.bytes()]).map(|bytes| u32::from_le_bytes(bytes) as usize).sum();
        let room = HEADER_BYTES + TOKEN_BYTES * (blocks + 1) + TABLE_ROOM * report.segments + code;
        let (summary, kernel, numbered) = by_kernel(&report, &read, elements, room);
        assert!(!summary.hard);
        assert_eq!(summary.end as usize, host.len(), "{blocks} blocks");
        assert!(kernel[..host.len()] == host, "{blocks} blocks: other tokens");
        assert!(
            kernel[host.len()..].iter().all(|byte| *byte == 0),
            "{blocks} blocks: written behind the end"
        );
        assert_eq!(numbered, targets, "{blocks} blocks");
        let changed: u64 =
            numbers(&read[report.changed()]).map(|bytes| u64::from(u32::from_le_bytes(bytes))).sum();
        assert_eq!(summary.changed, changed, "{blocks} blocks");

        // A block that takes more than half of its elements is the host's.
        let (block, whole) = (blocks / 2, 2 * BLOCK_ELEMENTS as u32);
        let (changed, bytes) = (report.changed().start + 4 * block, report.bytes().start + 4 * block);
        read[changed..changed + 4].copy_from_slice(&9_u32.to_le_bytes());
        read[bytes..bytes + 4].copy_from_slice(&(whole / 2 + 1).to_le_bytes());
        assert!(by_kernel(&report, &read, elements, room + whole as usize).0.hard, "{blocks} blocks");
    }
}
