//! What is in the log, without reading it: positions, groups, samples and where each record lies.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::ops::RangeInclusive;
use std::sync::Arc;

use crate::layout::segment::{self as layout, Entry, EntryState, Trailer};
use crate::sample::{Kind, PromptState};
use crate::segment::{self, Segment};

/// Sealed segments that stay in memory though no record of them is held.
const RESIDENT: usize = 4;

/// Has the CRC of a record's body been checked in this process?
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Checked {
    NotYet,
    Good,
    Bad,
}

/// A segment and its positions.
#[derive(Debug)]
pub(crate) struct Loaded {
    pub(crate) segment: Arc<Segment>,
    pub(crate) entries: Vec<Entry>,
    pub(crate) checked: Vec<Checked>,
    /// Unix time of the sealing in microseconds; `None` while records may follow.
    pub(crate) sealed_us: Option<u64>,
    /// The table has not been read yet: `entries` is empty and stands for this.
    pending: Option<Trailer>,
}

impl Loaded {
    /// One past its last position that is filled in.
    pub(crate) fn end(&self) -> u64 {
        let count = self.pending.map_or(self.entries.len() as u64, |trailer| trailer.count);
        self.segment.header.first + count
    }
}

/// A sealed segment of which the table has not been read.
pub(crate) struct Unread {
    pub(crate) segment: Arc<Segment>,
    trailer: Trailer,
}

impl Unread {
    pub(crate) fn entries(&self) -> Vec<Entry> {
        segment::entries(&self.segment, &self.trailer)
    }
}

/// Where one record lies.
#[derive(Debug, Clone)]
pub(crate) struct Place {
    pub(crate) segment: Arc<Segment>,
    pub(crate) entry: Entry,
    pub(crate) checked: Checked,
}

/// One sample of a group, and the score of its answer if it is the first of that.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Member {
    /// Its newest record.
    pub(crate) newest: Option<u64>,
    /// Its first finished record, if there was one.
    pub(crate) finished: Option<u64>,
    /// The first score and the newest one.
    pub(crate) scored: Option<(u64, u64)>,
}

impl Member {
    /// Takes note of a record. Tables are read in any order.
    fn note(&mut self, kind: u16, sequence: u64) {
        if kind == Kind::Score.code() {
            let (first, newest) = self.scored.unwrap_or((sequence, sequence));
            self.scored = Some((first.min(sequence), newest.max(sequence)));
            return;
        }
        self.newest = self.newest.max(Some(sequence));
        if kind == Kind::Sample.code() {
            self.finished = Some(self.finished.map_or(sequence, |first| first.min(sequence)));
        }
    }

    /// Forgets a record. Older ones are gone before.
    fn forget(&mut self, sequence: u64) {
        if self.newest == Some(sequence) {
            (self.newest, self.finished) = (None, None);
        }
        if self.scored.is_some_and(|(_, newest)| newest == sequence) {
            self.scored = None;
        }
    }

    fn is_empty(&self) -> bool {
        self.newest.is_none() && self.scored.is_none()
    }
}

/// All segments, by the number of their first record, and the records by their ids.
#[derive(Debug, Default)]
pub(crate) struct Index {
    segments: BTreeMap<u64, Loaded>,
    /// (rollout, group) → sample → its records.
    groups: BTreeMap<(u64, u64), BTreeMap<u64, Member>>,
    /// Sample → its newest record.
    samples: HashMap<u64, u64>,
    /// Prompt → its newest record.
    prompts: BTreeMap<u64, u64>,
    /// One past the last position that is filled in.
    end: u64,
    /// Segments of which the table has not been read yet.
    pending: BTreeSet<u64>,
    /// Sealed segments that were read from, the latest last: their pages are in memory.
    resident: VecDeque<u64>,
}

impl Index {
    pub(crate) fn add_segment(&mut self, segment: Arc<Segment>) {
        let first = segment.header.first;
        let (entries, checked) = (Vec::new(), Vec::new());
        let loaded = Loaded { segment, entries, checked, sealed_us: None, pending: None };
        self.segments.insert(first, loaded);
    }

    /// Adds a segment with a whole trailer. Its table is read when it is first needed: opening a log must not
    /// take longer the more there is in it.
    pub(crate) fn add_sealed(&mut self, segment: Arc<Segment>, trailer: Trailer) {
        let first = segment.header.first;
        self.add_segment(segment);
        if let Some(loaded) = self.segments.get_mut(&first) {
            (loaded.sealed_us, loaded.pending) = (Some(trailer.sealed_us), Some(trailer));
            self.end = self.end.max(loaded.end());
            self.pending.insert(first);
        }
    }

    /// The newest segment that a question needs and of which the table has not been read yet: to be read
    /// without a lock, and given to [`Index::fill`].
    pub(crate) fn unread(&self, needed: impl Fn(&Trailer) -> bool) -> Option<Unread> {
        self.pending.iter().rev().find_map(|first| {
            let loaded = self.segments.get(first)?;
            let trailer = loaded.pending.filter(&needed)?;
            Some(Unread { segment: Arc::clone(&loaded.segment), trailer })
        })
    }

    /// Takes the table of a segment, unless another thread has brought it before.
    pub(crate) fn fill(&mut self, first: u64, entries: Vec<Entry>) {
        let Some(loaded) = self.segments.get_mut(&first) else { return };
        if loaded.pending.take().is_none() {
            return;
        }
        self.pending.remove(&first);
        loaded.entries.reserve_exact(entries.len());
        loaded.checked.reserve_exact(entries.len());
        for entry in entries {
            self.push(first, entry, Checked::NotYet);
        }
    }

    /// The rollouts among these that have samples at or after `position`. Narrowed by what is known without
    /// reading a table.
    pub(crate) fn rollouts_from(&self, rollouts: RangeInclusive<u64>, position: u64) -> RangeInclusive<u64> {
        if position == 0 || self.pending.is_empty() {
            return rollouts;
        }
        let tail = self.segments.values().filter(|loaded| loaded.end() > position);
        let named = tail.map(|loaded| match loaded.pending {
            Some(trailer) => trailer.rollouts,
            None => layout::rollouts(&loaded.entries),
        });
        let (low, high) = named.fold((u64::MAX, 0), |(a, b), (low, high)| (a.min(low), b.max(high)));
        low.max(*rollouts.start())..=high.min(*rollouts.end())
    }

    /// Reads the tables of all segments.
    pub(crate) fn complete(&mut self) {
        while let Some(first) = self.pending.last().copied() {
            self.fill_in(first);
        }
    }

    /// Reads the table of one segment.
    fn fill_in(&mut self, first: u64) {
        let Some(loaded) = self.segments.get(&first) else { return };
        let Some(trailer) = loaded.pending else { return };
        let entries = segment::entries(&loaded.segment, &trailer);
        self.fill(first, entries);
    }

    /// Fills in the next position of a segment.
    pub(crate) fn push(&mut self, first: u64, entry: Entry, checked: Checked) {
        let Some(loaded) = self.segments.get_mut(&first) else { return };
        let sequence = first + loaded.entries.len() as u64;
        loaded.entries.push(entry);
        loaded.checked.push(checked);
        self.end = self.end.max(sequence + 1);
        if entry.state != EntryState::Record {
            return;
        }
        // Tables are read in any order.
        let newest = |known: &mut u64| *known = sequence.max(*known);
        if entry.kind == Kind::Prompt.code() {
            self.prompts.entry(entry.sample).and_modify(newest).or_insert(sequence);
        } else if entry.is_of_group() {
            let group = self.groups.entry((entry.rollout, entry.group)).or_default();
            group.entry(entry.sample).or_default().note(entry.kind, sequence);
            if entry.is_sample() {
                self.samples.entry(entry.sample).and_modify(newest).or_insert(sequence);
            }
        }
    }

    pub(crate) fn end(&self) -> u64 {
        self.end
    }

    /// First position that retention has kept.
    pub(crate) fn oldest(&self) -> u64 {
        self.segments.keys().next().copied().unwrap_or(self.end)
    }

    pub(crate) fn segment(&self, first: u64) -> Option<&Loaded> {
        self.segments.get(&first)
    }

    pub(crate) fn segment_mut(&mut self, first: u64) -> Option<&mut Loaded> {
        self.segments.get_mut(&first)
    }

    pub(crate) fn segments(&self) -> impl DoubleEndedIterator<Item = &Loaded> {
        self.segments.values()
    }

    /// The first position at or after `sequence` that is filled in, with what is there.
    pub(crate) fn at_or_after(&mut self, sequence: u64) -> Option<(u64, Place)> {
        let before = self.segments.range(..=sequence).next_back();
        let holds = |(first, loaded): &(&u64, &Loaded)| sequence.max(**first) < loaded.end();
        let (&first, _) = before.into_iter().chain(self.segments.range(sequence..)).find(holds)?;
        if self.pending.contains(&first) {
            self.fill_in(first);
        }
        self.touched(first);
        let loaded = self.segments.get(&first)?;
        let index = usize::try_from(sequence.saturating_sub(first)).ok()?;
        let (entry, checked) = (*loaded.entries.get(index)?, *loaded.checked.get(index)?);
        Some((first + index as u64, Place { segment: Arc::clone(&loaded.segment), entry, checked }))
    }

    /// A segment is read from. Of the sealed ones, a few stay in memory; the others only as long as a reader
    /// holds records of them.
    fn touched(&mut self, first: u64) {
        if self.resident.back() == Some(&first) {
            return;
        }
        self.resident.retain(|&other| other != first);
        self.resident.push_back(first);
        for _ in RESIDENT..self.resident.len() {
            let Some(oldest) = self.resident.pop_front() else { return };
            match self.segments.get(&oldest) {
                // Held: asked again when the next segment comes in.
                Some(loaded) if Arc::strong_count(&loaded.segment.map) > 1 => self.resident.push_back(oldest),
                Some(loaded) if loaded.sealed_us.is_some() => loaded.segment.map.let_go(),
                _ => {}
            }
        }
    }

    /// Notes the outcome of checking a record.
    pub(crate) fn set_checked(&mut self, sequence: u64, checked: Checked) {
        if let Some((&first, loaded)) = self.segments.range_mut(..=sequence).next_back()
            && let Some(slot) =
                usize::try_from(sequence - first).ok().and_then(|index| loaded.checked.get_mut(index))
        {
            *slot = checked;
        }
    }

    /// The groups of some rollouts: (rollout, group) and the samples of each.
    pub(crate) fn groups(
        &self,
        rollouts: RangeInclusive<u64>,
    ) -> impl Iterator<Item = ((u64, u64), &BTreeMap<u64, Member>)> {
        let range = (*rollouts.start(), 0)..=(*rollouts.end(), u64::MAX);
        let sane = rollouts.start() <= rollouts.end();
        sane.then(|| self.groups.range(range)).into_iter().flatten().map(|(&ids, members)| (ids, members))
    }

    /// What stands at a position.
    pub(crate) fn entry(&self, sequence: u64) -> Option<&Entry> {
        let (&first, loaded) = self.segments.range(..=sequence).next_back()?;
        loaded.entries.get(usize::try_from(sequence - first).ok()?)
    }

    /// The rollouts that have records.
    pub(crate) fn rollouts(&self) -> Vec<u64> {
        let mut rollouts: Vec<u64> = self.groups.keys().map(|&(rollout, _)| rollout).collect();
        rollouts.dedup();
        rollouts
    }

    /// The newest score of an answer.
    pub(crate) fn score(&self, ids: (u64, u64), answer: u64) -> Option<u64> {
        Some(self.groups.get(&ids)?.get(&answer)?.scored?.1)
    }

    /// The newest record of a sample.
    pub(crate) fn sample(&self, sample: u64) -> Option<u64> {
        self.samples.get(&sample).copied()
    }

    /// The newest record of every sample.
    pub(crate) fn newest_samples(&self) -> impl Iterator<Item = u64> {
        self.samples.values().copied()
    }

    /// The newest record of every prompt, by prompt id.
    pub(crate) fn prompts(&self) -> impl Iterator<Item = u64> {
        self.prompts.values().copied()
    }

    /// The newest record of a prompt.
    pub(crate) fn prompt(&self, prompt: u64) -> Option<u64> {
        self.prompts.get(&prompt).copied()
    }

    /// The largest prompt id.
    pub(crate) fn last_prompt(&self) -> Option<u64> {
        self.prompts.last_key_value().map(|(&id, _)| id)
    }

    /// The first position of a segment that is needed to resume. It is the newest record of a prompt that is
    /// not done, or of a sample that is not finished, unless the prompt of its group is done.
    pub(crate) fn needed(&self, first: u64) -> Option<u64> {
        let entries = &self.segments.get(&first)?.entries;
        let is_done = |prompt: u64| {
            let newest = self.prompt(prompt).and_then(|sequence| self.entry(sequence));
            newest.is_some_and(|newest| newest.status == PromptState::Done.code())
        };
        let needed = |(sequence, entry): &(u64, &Entry)| match (entry.state, Kind::from_code(entry.kind)) {
            (EntryState::Record, Some(Kind::Prompt)) => {
                entry.status != PromptState::Done.code() && self.prompts.get(&entry.sample) == Some(sequence)
            }
            (EntryState::Record, Some(Kind::Partial)) => {
                self.samples.get(&entry.sample) == Some(sequence) && !is_done(entry.group)
            }
            _ => false,
        };
        (first..).zip(entries).find(needed).map(|(sequence, _)| sequence)
    }

    /// Forgets a segment and all its records.
    pub(crate) fn remove_segment(&mut self, first: u64) -> Option<Loaded> {
        if self.pending.contains(&first) {
            self.fill_in(first);
        }
        let loaded = self.segments.remove(&first)?;
        for (index, entry) in
            loaded.entries.iter().enumerate().filter(|(_, entry)| entry.state == EntryState::Record)
        {
            let sequence = first + index as u64;
            if entry.kind == Kind::Prompt.code() {
                if self.prompts.get(&entry.sample) == Some(&sequence) {
                    self.prompts.remove(&entry.sample);
                }
                continue;
            }
            if self.samples.get(&entry.sample) == Some(&sequence) {
                self.samples.remove(&entry.sample);
            }
            let key = (entry.rollout, entry.group);
            if let Some(samples) = self.groups.get_mut(&key) {
                if let Some(member) = samples.get_mut(&entry.sample) {
                    member.forget(sequence);
                    if member.is_empty() {
                        samples.remove(&entry.sample);
                    }
                }
                if samples.is_empty() {
                    self.groups.remove(&key);
                }
            }
        }
        Some(loaded)
    }
}
