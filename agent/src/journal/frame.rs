//! Groups of records as bytes: a mark, a length, a checksum, and each record behind its length.

/// Begins each group.
const MARK: [u8; 8] = *b"dl-turns";
const HEADER: usize = 16;
/// Longest record.
pub(super) const RECORD_BYTES_MAX: usize = 1 << 30;

/// A group of these records.
pub(super) fn group<'a>(records: impl Iterator<Item = &'a [u8]>) -> Vec<u8> {
    let mut group = vec![0; HEADER];
    for record in records {
        group.extend((record.len() as u32).to_le_bytes());
        group.extend(record);
    }
    let length = ((group.len() - HEADER) as u32).to_le_bytes();
    group[..8].copy_from_slice(&MARK);
    group[8..12].copy_from_slice(&length);
    let sum = checksum(length, &group[HEADER..]);
    group[12..HEADER].copy_from_slice(&sum);
    group
}

fn checksum(length: [u8; 4], payload: &[u8]) -> [u8; 4] {
    crc32c::crc32c_append(crc32c::crc32c(&length), payload).to_le_bytes()
}

/// All records, and the end of the last whole group. What is behind it, a crash may have left.
///
/// # Errors
/// Bytes that are no group, with a whole group behind them, and a file that begins as no journal does: no crash leaves
/// these. A loss of power may leave zeros.
pub(super) fn read(bytes: &[u8]) -> Result<(Vec<&[u8]>, usize), String> {
    let (mut records, mut at) = (Vec::new(), 0);
    let said = bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
    while let Some(payload) = payload(&bytes[at..]) {
        at += HEADER + payload.len();
        split(payload, &mut records)
            .ok_or_else(|| format!("expected records before byte {at}, found others"))?;
    }
    let start = &bytes[..bytes.len().min(MARK.len())];
    if !MARK.starts_with(start) && start.iter().any(|byte| *byte != 0) {
        return Err(
            "expected a journal of sessions, found a file that begins otherwise; give another place".into()
        );
    }
    let begins =
        |from: usize| bytes[from..said].windows(MARK.len()).position(|here| here == MARK).map(|by| from + by);
    let mut from = at + 1;
    // Behind them are zeros, in which nothing begins.
    while let Some(next) = (from < said).then(|| begins(from)).flatten() {
        if payload(&bytes[next..]).is_some() {
            return Err(format!(
                "expected a group of records at byte {at}, found damage, and whole records from byte {next} on; \
                 restore the file from a copy, or move it away and begin anew"
            ));
        }
        from = next + 1;
    }
    Ok((records, at))
}

/// What is in the group that `bytes` begin with.
fn payload(bytes: &[u8]) -> Option<&[u8]> {
    let rest = bytes.strip_prefix(&MARK)?;
    let (length, rest) = rest.split_first_chunk()?;
    let (sum, rest) = rest.split_first_chunk()?;
    let payload = rest.get(..u32::from_le_bytes(*length) as usize)?;
    (checksum(*length, payload) == *sum).then_some(payload)
}

fn split<'a>(mut payload: &'a [u8], records: &mut Vec<&'a [u8]>) -> Option<()> {
    while !payload.is_empty() {
        let (length, rest) = payload.split_first_chunk()?;
        let (record, rest) = rest.split_at_checked(u32::from_le_bytes(*length) as usize)?;
        records.push(record);
        payload = rest;
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn groups() -> Vec<Vec<u8>> {
        let group = |records: &[&[u8]]| super::group(records.iter().copied());
        vec![group(&[b"one", b"", b"dl-turns"]), group(&[b"two"]), group(&[&[7; 300], b"three"])]
    }

    #[test]
    fn a_file_cut_anywhere_has_its_whole_groups() {
        let groups = groups();
        let whole = groups.concat();
        let ends = [0, groups[0].len(), groups[0].len() + groups[1].len(), whole.len()];
        for cut in 0..=whole.len() {
            let (records, end) = read(&whole[..cut]).unwrap();
            let kept = ends.iter().rposition(|end| *end <= cut).unwrap();
            assert_eq!((records.len(), end), ([0, 3, 4, 6][kept], ends[kept]), "cut at {cut}");
        }
    }

    #[test]
    fn file_of_something_else_is_refused_and_zeros_are_cut() {
        for other in [&b"{"[..], b"not a journal", b"dl-turnip and more", &[0, 0, 1]] {
            assert!(read(other).unwrap_err().contains("begins otherwise"), "{other:?}");
        }
        for torn in [&b""[..], b"dl-tu", b"dl-turns", &[0; 100]] {
            assert_eq!(read(torn), Ok((Vec::new(), 0)));
        }
    }

    #[test]
    fn damage_before_the_last_group_is_refused() {
        let groups = groups();
        let whole = groups.concat();
        let last = whole.len() - groups[2].len();
        for at in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[at] ^= 0x10;
            match read(&damaged) {
                Ok((records, end)) => assert!(at >= last && records.len() == 4 && end == last, "byte {at}"),
                Err(reason) => {
                    let what = if at < MARK.len() { "begins otherwise" } else { "damage" };
                    assert!(at < last && reason.contains(what), "byte {at}: {reason}");
                }
            }
        }
    }
}
