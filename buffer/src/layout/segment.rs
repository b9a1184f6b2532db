//! The fixed ends of a segment: the header page, and, once it is sealed, the index table and the trailer.

use super::field::{self, put};
use std::ops::RangeInclusive;

use super::body::{EVALUATION, SCORE_FOLLOWS};
use super::salted_crc;
use crate::position::Identity;
use crate::sample::{Kind, answer};

/// Bytes before the first frame. Two copies of the header share them, so that one damaged byte costs no
/// records.
pub(crate) const HEADER_PAGE: usize = 4096;
const COPY: usize = HEADER_PAGE / 2;
/// Bytes of the trailer, the last ones of the file.
pub(crate) const TRAILER: usize = 64;
/// Bytes of one entry of the index table.
pub(crate) const ENTRY: usize = 64;
/// Version of the format that new segments have.
pub(crate) const FORMAT: u32 = 2;
/// The oldest that this build reads.
const FORMAT_MIN: u32 = 1;
/// Feature bits without which a file of today cannot be read; this build knows none.
const REQUIRED_KNOWN: u64 = 0;

const MAGIC: [u8; 8] = *b"dlrollog";
const TRAILER_MAGIC: [u8; 8] = *b"dlrseald";

/// What the header page says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SegmentHeader {
    /// Version of its format.
    pub(crate) format: u32,
    pub(crate) identity: Identity,
    /// Length of the file in bytes, fixed at creation.
    pub(crate) capacity: u64,
    /// Number of the first record.
    pub(crate) first: u64,
    /// Seed of the CRCs of this segment's headers.
    pub(crate) salt: u64,
    /// Unix time of creation in microseconds; information only.
    pub(crate) created_us: u64,
}

/// Why a header page was not accepted.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum HeaderFault {
    /// Neither copy is whole.
    Damaged,
    /// Written by a newer program: (what, found, known).
    Unsupported(&'static str, String, String),
}

impl SegmentHeader {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut copy = vec![0; COPY];
        put(&mut copy, 0, &MAGIC);
        put(&mut copy, 8, &self.format.to_le_bytes());
        // 12..16 is zero; 16..32 are the required and the optional feature bits, none so far.
        put(&mut copy, 32, &self.capacity.to_le_bytes());
        put(&mut copy, 40, &self.first.to_le_bytes());
        put(&mut copy, 48, &self.salt.to_le_bytes());
        put(&mut copy, 56, &self.created_us.to_le_bytes());
        put(&mut copy, 64, &self.identity.run_id);
        put(&mut copy, 80, &self.identity.tokenizer_digest);
        let model = self.identity.model.as_bytes();
        let length = model.len().min(Identity::MODEL_BYTES_MAX);
        put(&mut copy, 112, &(length as u64).to_le_bytes());
        put(&mut copy, 120, &model[..length]);
        let crc = crc32c::crc32c(&copy[..COPY - 4]);
        put(&mut copy, COPY - 4, &crc.to_le_bytes());
        copy.extend_from_within(..);
        copy
    }

    /// Reads a header page. The second value says whether both copies were whole.
    pub(crate) fn decode(page: &[u8]) -> Result<(Self, bool), HeaderFault> {
        let whole = |copy: &&[u8]| {
            copy.len() == COPY
                && copy[..8] == MAGIC
                && field::u32(copy, COPY - 4) == crc32c::crc32c(&copy[..COPY - 4])
        };
        let copies: Vec<&[u8]> = page.chunks(COPY).take(2).filter(whole).collect();
        let Some(copy) = copies.first() else { return Err(HeaderFault::Damaged) };
        let format = field::u32(copy, 8);
        if !(FORMAT_MIN..=FORMAT).contains(&format) {
            let known = format!("{FORMAT_MIN} to {FORMAT}");
            return Err(HeaderFault::Unsupported("log format", format.to_string(), known));
        }
        let required = field::u64(copy, 16);
        if required & !REQUIRED_KNOWN != 0 {
            let (found, known) = (format!("{required:#x}"), format!("{REQUIRED_KNOWN:#x}"));
            return Err(HeaderFault::Unsupported("log features", found, known));
        }
        let length = usize::try_from(field::u64(copy, 112)).unwrap_or(usize::MAX);
        let model = copy.get(120..120usize.saturating_add(length)).ok_or(HeaderFault::Damaged)?;
        let identity = Identity {
            run_id: field::array(copy, 64),
            tokenizer_digest: field::array(copy, 80),
            model: String::from_utf8(model.to_vec()).map_err(|_| HeaderFault::Damaged)?,
        };
        let header = Self {
            format,
            identity,
            capacity: field::u64(copy, 32),
            first: field::u64(copy, 40),
            salt: field::u64(copy, 48),
            created_us: field::u64(copy, 56),
        };
        Ok((header, copies.len() == 2))
    }
}

/// What became of a position, as the index table records it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum EntryState {
    /// Given up by its producer.
    #[default]
    Void,
    /// A record.
    Record,
    /// Incomplete after a crash, and nothing shows that it was ever acknowledged.
    Torn,
    /// Was acknowledged, and was damaged when the segment was sealed by recovery.
    Corrupt,
}

impl EntryState {
    fn from_code(code: u16) -> Option<Self> {
        [Self::Void, Self::Record, Self::Torn, Self::Corrupt].into_iter().find(|state| *state as u16 == code)
    }
}

/// One position of a segment: what queries need to know without touching the record.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct Entry {
    pub(crate) state: EntryState,
    pub(crate) kind: u16,
    pub(crate) status: u16,
    pub(crate) offset: u64,
    /// Bytes of the frame.
    pub(crate) bytes: u64,
    pub(crate) tokens: u32,
    /// Tokens of the response.
    pub(crate) response: u32,
    pub(crate) reward: f32,
    /// As in [`Scalars`](crate::Scalars).
    pub(crate) parts: u16,
    pub(crate) flags: u16,
    pub(crate) sample: u64,
    pub(crate) group: u64,
    pub(crate) rollout: u64,
    pub(crate) oldest_version: u64,
    pub(crate) newest_version: u64,
}

impl Entry {
    /// Is it a record of a sample, finished or partial?
    pub(crate) fn is_sample(&self) -> bool {
        self.is_of_group() && self.kind != Kind::Score.code()
    }

    /// Does it belong to a group: a sample or its score, and not of an evaluation?
    pub(crate) fn is_of_group(&self) -> bool {
        self.state == EntryState::Record && self.kind != Kind::Prompt.code() && self.flags & EVALUATION == 0
    }

    /// Is its reward a record of its own?
    pub(crate) fn score_follows(&self) -> bool {
        self.flags & SCORE_FOLLOWS != 0
    }

    /// The answer of a sample or a score.
    pub(crate) fn answer(&self) -> u64 {
        answer(self.sample, self.parts)
    }

    /// An entry for a position without a record.
    pub(crate) fn empty(state: EntryState, offset: u64, bytes: u64) -> Self {
        Self { state, offset, bytes, ..Self::default() }
    }

    fn encode(&self, format: u32) -> [u8; ENTRY] {
        // Frames are multiples of 64 bytes and segments stay below 2^38, so this never truncates.
        let units = |bytes: u64| u32::try_from(bytes / super::ALIGN as u64).unwrap_or(u32::MAX);
        let mut block = [0; ENTRY];
        put(&mut block, 8, &self.sample.to_le_bytes());
        put(&mut block, 16, &self.group.to_le_bytes());
        put(&mut block, 24, &self.rollout.to_le_bytes());
        put(&mut block, 32, &self.oldest_version.to_le_bytes());
        put(&mut block, 52, &self.tokens.to_le_bytes());
        put(&mut block, 60, &self.status.to_le_bytes());
        if format == 1 {
            put(&mut block, 0, &self.offset.to_le_bytes());
            put(&mut block, 40, &self.newest_version.to_le_bytes());
            put(&mut block, 48, &units(self.bytes).to_le_bytes());
            put(&mut block, 56, &self.kind.to_le_bytes());
            put(&mut block, 58, &(self.state as u16).to_le_bytes());
            return block;
        }
        // Versions 2^32 apart stand as that far: what queries ask for is whether a group is too old.
        let behind = self.newest_version.checked_sub(self.oldest_version);
        let behind = behind.map_or(u32::MAX, |behind| u32::try_from(behind).unwrap_or(u32::MAX - 1));
        put(&mut block, 0, &units(self.offset).to_le_bytes());
        put(&mut block, 4, &units(self.bytes).to_le_bytes());
        put(&mut block, 40, &behind.to_le_bytes());
        put(&mut block, 44, &self.response.to_le_bytes());
        put(&mut block, 48, &self.reward.to_le_bytes());
        // Kinds are few.
        put(&mut block, 56, &[self.kind as u8, self.state as u8]);
        put(&mut block, 58, &self.parts.to_le_bytes());
        put(&mut block, 62, &self.flags.to_le_bytes());
        block
    }

    fn decode(block: &[u8], format: u32) -> Option<Self> {
        let bytes = |at| u64::from(field::u32(block, at)) * super::ALIGN as u64;
        let entry = Self {
            status: field::u16(block, 60),
            tokens: field::u32(block, 52),
            sample: field::u64(block, 8),
            group: field::u64(block, 16),
            rollout: field::u64(block, 24),
            oldest_version: field::u64(block, 32),
            ..Self::default()
        };
        if format == 1 {
            return Some(Self {
                state: EntryState::from_code(field::u16(block, 58))?,
                kind: field::u16(block, 56),
                offset: field::u64(block, 0),
                bytes: bytes(48),
                newest_version: field::u64(block, 40),
                ..entry
            });
        }
        let newest_version = match field::u32(block, 40) {
            u32::MAX => 0,
            behind => entry.oldest_version.saturating_add(u64::from(behind)),
        };
        Some(Self {
            state: EntryState::from_code(u16::from(block[57]))?,
            kind: u16::from(block[56]),
            offset: bytes(0),
            bytes: bytes(4),
            response: field::u32(block, 44),
            reward: f32::from_le_bytes(field::array(block, 48)),
            parts: field::u16(block, 58),
            flags: field::u16(block, 62),
            newest_version,
            ..entry
        })
    }
}

/// The last 64 bytes of a sealed segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Trailer {
    /// End of the last frame, and start of the index table.
    pub(crate) table: u64,
    /// Entries in the table.
    pub(crate) count: u64,
    /// CRC32C of the table.
    pub(crate) table_crc: u32,
    /// Number of the first record of the next segment.
    pub(crate) next: u64,
    /// Unix time of the sealing in microseconds.
    pub(crate) sealed_us: u64,
    /// Smallest and largest rollout id among the samples and scores; the first is larger than the second when there are
    /// none.
    pub(crate) rollouts: (u64, u64),
}

/// The rollouts that a table names.
pub(crate) fn rollouts(entries: &[Entry]) -> (u64, u64) {
    let samples = entries.iter().filter(|entry| entry.is_of_group());
    samples.fold((u64::MAX, 0), |(low, high), entry| (low.min(entry.rollout), high.max(entry.rollout)))
}

impl Trailer {
    /// May the table name one of these rollouts?
    pub(crate) fn names(&self, rollouts: &RangeInclusive<u64>) -> bool {
        self.rollouts.0 <= *rollouts.end() && *rollouts.start() <= self.rollouts.1
    }

    pub(crate) fn encode(&self, salt: u64) -> [u8; TRAILER] {
        let mut block = [0; TRAILER];
        put(&mut block, 0, &TRAILER_MAGIC);
        put(&mut block, 8, &self.table.to_le_bytes());
        put(&mut block, 16, &self.count.to_le_bytes());
        put(&mut block, 24, &self.next.to_le_bytes());
        put(&mut block, 32, &self.sealed_us.to_le_bytes());
        put(&mut block, 40, &self.table_crc.to_le_bytes());
        put(&mut block, 44, &self.rollouts.0.to_le_bytes());
        // Inverted, so that the zeros of earlier builds mean any rollout.
        put(&mut block, 52, &(!self.rollouts.1).to_le_bytes());
        let crc = salted_crc(salt, &block[..60]);
        put(&mut block, 60, &crc.to_le_bytes());
        block
    }

    /// `None` unless whole and consistent with a file of `capacity` bytes.
    pub(crate) fn decode(block: &[u8; TRAILER], salt: u64, capacity: u64) -> Option<Self> {
        if block[..8] != TRAILER_MAGIC || field::u32(block, 60) != salted_crc(salt, &block[..60]) {
            return None;
        }
        let trailer = Self {
            table: field::u64(block, 8),
            count: field::u64(block, 16),
            next: field::u64(block, 24),
            sealed_us: field::u64(block, 32),
            table_crc: field::u32(block, 40),
            rollouts: (field::u64(block, 44), !field::u64(block, 52)),
        };
        let end = trailer.count.checked_mul(ENTRY as u64)?.checked_add(trailer.table)?;
        let sane = trailer.table >= HEADER_PAGE as u64
            && trailer.table.is_multiple_of(super::ALIGN as u64)
            && end <= capacity.checked_sub(TRAILER as u64)?;
        sane.then_some(trailer)
    }
}

/// The index table of `entries` in a segment of this format, and its CRC.
pub(crate) fn encode_table(entries: &[Entry], format: u32) -> (Vec<u8>, u32) {
    let table: Vec<u8> = entries.iter().flat_map(|entry| entry.encode(format)).collect();
    let crc = crc32c::crc32c(&table);
    (table, crc)
}

/// The entries of a table, if it is the one the trailer describes.
pub(crate) fn decode_table(table: &[u8], trailer: &Trailer, format: u32) -> Option<Vec<Entry>> {
    if crc32c::crc32c(table) != trailer.table_crc {
        return None;
    }
    let inside = |entry: &Entry| {
        entry.offset >= HEADER_PAGE as u64
            && entry.offset.is_multiple_of(super::ALIGN as u64)
            && entry.offset.checked_add(entry.bytes).is_some_and(|end| end <= trailer.table)
    };
    table.chunks_exact(ENTRY).map(|block| Entry::decode(block, format).filter(inside)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> SegmentHeader {
        SegmentHeader {
            format: FORMAT,
            identity: Identity { run_id: [7; 16], model: "policy".into(), tokenizer_digest: [9; 32] },
            capacity: 1 << 16,
            first: 40,
            salt: 0x1234,
            created_us: 5,
        }
    }

    #[test]
    fn header_survives_any_one_flipped_byte() {
        let page = header().encode();
        assert_eq!(SegmentHeader::decode(&page), Ok((header(), true)));
        for at in (0..page.len()).step_by(if cfg!(miri) { 97 } else { 1 }) {
            let mut bad = page.clone();
            bad[at] ^= 0x40;
            assert_eq!(SegmentHeader::decode(&bad), Ok((header(), false)), "byte {at}");
        }
        assert_eq!(SegmentHeader::decode(&page[..100]), Err(HeaderFault::Damaged));
    }

    #[test]
    fn newer_formats_are_refused_by_name() {
        let mut page = header().encode();
        page[8] = 3;
        let crc = crc32c::crc32c(&page[..COPY - 4]).to_le_bytes();
        page[COPY - 4..COPY].copy_from_slice(&crc);
        page[COPY..].fill(0);
        let fault = SegmentHeader::decode(&page).unwrap_err();
        assert_eq!(fault, HeaderFault::Unsupported("log format", "3".into(), "1 to 2".into()));
    }

    #[test]
    fn unknown_features_are_refused_if_required_and_else_ignored() {
        let with = |at: usize| {
            let mut page = header().encode();
            page[at] = 0x20;
            let crc = crc32c::crc32c(&page[..COPY - 4]).to_le_bytes();
            page[COPY - 4..COPY].copy_from_slice(&crc);
            page.copy_within(..COPY, COPY);
            SegmentHeader::decode(&page)
        };
        let refused = HeaderFault::Unsupported("log features", "0x20".into(), "0x0".into());
        assert_eq!(with(16), Err(refused));
        assert_eq!(with(24), Ok((header(), true)));
    }

    #[test]
    fn tables_of_both_formats_round_trip() {
        let record = Entry {
            sample: 3,
            group: 2,
            rollout: 1,
            tokens: 5,
            kind: 1,
            status: 0xfffe,
            oldest_version: 7,
            newest_version: 9,
            ..Entry::empty(EntryState::Record, 4096, 640)
        };
        let more = Entry { response: 4, reward: -0.5, parts: 6, flags: 3, ..record };
        let without = Entry { oldest_version: u64::MAX, newest_version: 0, ..record };
        let trailer = |table_crc| Trailer {
            table: 4864,
            count: 3,
            table_crc,
            next: 42,
            sealed_us: 1,
            rollouts: (5, 9),
        };
        for (format, first) in [(1, record), (2, more)] {
            let entries = [first, without, Entry::empty(EntryState::Corrupt, 4736, 128)];
            let (table, crc) = encode_table(&entries, format);
            assert_eq!(
                decode_table(&table, &trailer(crc), format),
                Some(entries.to_vec()),
                "format {format}"
            );
            let mut bad = table;
            bad[70] ^= 1;
            assert_eq!(decode_table(&bad, &trailer(crc), format), None);
        }
        let far = Entry { newest_version: u64::MAX - 1, ..record };
        let (table, crc) = encode_table(&[far], 2);
        let newest = decode_table(&table, &trailer(crc), 2).unwrap()[0].newest_version;
        assert_eq!(newest, 7 + u64::from(u32::MAX - 1));
    }

    #[test]
    fn trailer_round_trips() {
        let table_crc = 4;
        let trailer = Trailer { table: 4864, count: 2, table_crc, next: 42, sealed_us: 1, rollouts: (5, 9) };
        let block = trailer.encode(8);
        assert_eq!(Trailer::decode(&block, 8, 1 << 16), Some(trailer));
        assert_eq!(Trailer::decode(&block, 9, 1 << 16), None);
        assert_eq!(Trailer::decode(&block, 8, 4992), None, "table would overlap the trailer");
        let mut old = block;
        old[44..60].fill(0);
        let crc = salted_crc(8, &old[..60]);
        old[60..].copy_from_slice(&crc.to_le_bytes());
        let any = Trailer { rollouts: (0, u64::MAX), ..trailer };
        assert_eq!(Trailer::decode(&old, 8, 1 << 16), Some(any), "earlier builds did not note rollouts");
    }
}
