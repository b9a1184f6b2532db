//! The answers of a run, out of its log: lists of a step's, and one of them token by token.

use super::mismatch::{self, Mismatches, Worst};
use super::outlines::{self, cause, outline};
use super::prompts::{Again, again};
use super::read::{Taken, json};
use crate::cli::log::show::{groups, ids};
use crate::cli::log::texts::{Texts, log_in};
use crate::cli::shared::error::{Error, Result};
use crate::cli::shared::timeline::is_answer;
use driftless::buffer::query::Outline;
use driftless::buffer::sample::{Scalars, Verdict};
use driftless::buffer::{Finish, Kind, Position, Reader, Record};
use driftless::trainer::data::Tokenizer;
use driftless::trainer::rollout::{EvaluationNote, PromptNote};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

/// Rows of a list, and answers of a group.
const ROWS_MAX: usize = 200;
/// Tokens of an answer, and of its prompt, that are shown.
const TOKENS_MAX: usize = 20_000;
/// Records that are looked at for answers that no index names.
const SCANNED_MAX: usize = 16_384;
/// Tokens that one character may need.
const TOKENS_OF_CHARACTER: usize = 8;

/// What is asked for.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Ask {
    /// Number of the run.
    pub(super) run: usize,
    pub(super) epoch: u64,
    pub(super) from: usize,
    /// What the names of figures begin with.
    pub(super) prefix: String,
    pub(super) step: Option<u64>,
    /// Steps of a window that ends with `step`.
    pub(super) steps: Option<u64>,
    pub(super) kind: Which,
    pub(super) order: Order,
    pub(super) reward_min: Option<f32>,
    pub(super) reward_max: Option<f32>,
    pub(super) length_min: Option<usize>,
    pub(super) length_max: Option<usize>,
    pub(super) mismatch_min: Option<f32>,
    pub(super) finish: Option<String>,
    /// Answers that this version drew, or that one before and one behind it did.
    pub(super) version: Option<u64>,
    /// Of those that were left out: why.
    pub(super) failure: Option<String>,
    pub(super) position: u64,
}

/// Which answers of a step.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Which {
    /// Those that it learned from.
    #[default]
    Learned,
    /// Those that were generated for it, and that no step learns from.
    LeftOut,
    Evaluation,
    /// Those of any step on which learner and engines disagree most.
    Mismatched,
    /// Those of all steps but of evaluations, learned from or not.
    All,
}

#[derive(Debug, Default, Clone, Copy, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Order {
    #[default]
    Log,
    Best,
    Worst,
    Longest,
    Shortest,
    Mismatch,
}

/// An answer in a list.
#[derive(Serialize)]
struct Row {
    position: u64,
    prompt_id: u64,
    answer: u64,
    part: usize,
    reward: Option<f32>,
    raw_reward: Option<f32>,
    finish: String,
    masked: bool,
    tokens: usize,
    versions: Option<(u64, u64)>,
    engine: String,
    /// From when it was asked for to its last token.
    seconds: Option<f64>,
    /// The step that it was generated for.
    seat: u64,
    /// The step that learned from it, and the furthest that learner and engine are apart then, in nats.
    learned: Option<u64>,
    mismatch: Option<f32>,
    why: Option<String>,
}

#[derive(Serialize)]
struct List {
    step: u64,
    /// The first and the last step with answers.
    steps: Option<(u64, u64)>,
    /// Groups that the step took, and those of them that the log still has.
    groups: usize,
    found: usize,
    /// Answers that the filter leaves, from which of them on, and these.
    total: usize,
    from: usize,
    rows: Vec<Row>,
    /// Of all steps: the answers that were looked at. Only the first ones are listed.
    looked: Option<usize>,
    /// Groups that no step learns from, by why.
    causes: BTreeMap<String, usize>,
    /// Whether more of the log would have to be read than was.
    cut: bool,
    /// Why mismatches are missing.
    untold: Option<String>,
}

#[derive(Serialize)]
struct Shown {
    #[serde(flatten)]
    row: Row,
    step: u64,
    set: Option<String>,
    source: String,
    label: Option<Box<RawValue>>,
    prompt: Option<String>,
    prompt_tokens: usize,
    /// Texts of the answer's tokens, or their ids where `untold` says why there is no text.
    texts: Vec<String>,
    untold: Option<String>,
    log_probs: Vec<f32>,
    /// Of the learner before the step: nothing for tokens that were not trained on.
    learner_log_probs: Vec<f32>,
    mask: Vec<u8>,
    /// Version, first token, and one past the last.
    spans: Vec<(u64, u32, u32)>,
    /// The answers to the same prompt, and other groups of it.
    group: Vec<Row>,
    again: Vec<Again>,
}

/// The log of a run, opened when it is first asked for.
pub(super) struct Samples {
    dir: PathBuf,
    reader: Option<Reader>,
    tokenizer: Option<Tokenizer>,
    worst: Worst,
}

impl Samples {
    pub(super) fn new(dir: &Path) -> Self {
        Samples { dir: dir.to_owned(), reader: None, tokenizer: None, worst: Worst::default() }
    }

    fn reader(&mut self) -> Result<Reader> {
        if let Some(reader) = &self.reader {
            reader.refresh()?;
            return Ok(reader.clone());
        }
        Ok(self.reader.insert(Reader::open(log_in(self.dir.clone()))?).clone())
    }

    /// The first and the last step that answers are of.
    pub(super) fn steps(&mut self) -> Result<Option<(u64, u64)>> {
        let rollouts = self.reader()?.rollouts();
        Ok(rollouts.first().copied().zip(rollouts.last().copied()))
    }

    /// Answers of these steps as `trace` has them, of the last steps at most so many, in the order of the log; and whether
    /// there may be more.
    pub(super) fn of_steps(
        &mut self,
        steps: RangeInclusive<u64>,
        most: usize,
    ) -> Result<(Vec<Record>, bool)> {
        let reader = self.reader()?;
        let (mut found, mut is_cut) = (BTreeMap::new(), false);
        for step in steps.rev() {
            let (others, .., cut) = apart(&reader, step, is_answer);
            is_cut |= cut;
            let groups = reader.groups(step, 1);
            let learned = groups.into_iter().flat_map(|group| group.records).filter(is_answer);
            found.extend(learned.chain(others).map(|record| (record.position(), record)));
            if found.len() > most {
                is_cut = true;
                break;
            }
        }
        Ok((found.into_values().rev().take(most).rev().collect(), is_cut))
    }

    /// A page of the answers of a step, as JSON.
    pub(super) fn list(&mut self, ask: &Ask, taken: &Taken) -> Result<String> {
        let reader = self.reader()?;
        let steps = taken.range().or_else(|| {
            let rollouts = reader.rollouts();
            Some((*rollouts.first()?, *rollouts.last()?))
        });
        ask.check()?;
        let step = ask.step.or(steps.map(|(_, last)| last)).unwrap_or_default();
        let (known, untold) = self.mismatches(&reader, ask.kind, step)?;
        let Picked { mut records, groups, found, total, looked, causes, cut } =
            pick(&reader, ask, step, taken.of(step), &known)?;
        let is_near = |record: &Record| {
            let mismatch = known.get(&record.position());
            ask.mismatch_min.is_none_or(|least| mismatch.is_some_and(|found| found.nats >= least))
        };
        records.retain(|record| ask.is_wanted(&outline(record)) && is_near(record));
        ask.sort(&mut records, &known);
        let (total, from) = (total.unwrap_or(records.len()), ask.from.min(records.len()));
        let shown = records.iter().skip(from).take(ROWS_MAX);
        let rows = shown.map(|record| row(record, ask.kind, &reader, &known)).collect();
        json(&List { step, steps, groups, found, total, from, rows, looked, causes, cut, untold })
    }

    /// The mismatches that a list shows, and why some are missing.
    fn mismatches(
        &mut self,
        reader: &Reader,
        kind: Which,
        step: u64,
    ) -> Result<(Mismatches, Option<String>)> {
        match kind {
            Which::LeftOut | Which::Evaluation | Which::All => Ok((Mismatches::new(), None)),
            Which::Mismatched => {
                let (largest, untold) = self.worst.look(reader)?;
                Ok((largest.clone(), untold))
            }
            Which::Learned => Ok(match reader.learned(step) {
                Ok(learned) => (learned.map(|some| mismatch::of_step(&some, step)).unwrap_or_default(), None),
                Err(error) => (Mismatches::new(), Some(error.to_string())),
            }),
        }
    }

    /// One answer, as JSON.
    pub(super) fn one(&mut self, position: u64, taken: &Taken) -> Result<String> {
        let reader = self.reader()?;
        let record = reader.get(Position(position))?.filter(|record| record.kind() == Kind::Sample);
        let record =
            record.ok_or_else(|| Error::usage("position", "that of an answer in the log", position))?;
        let scalars = record.scalars();
        let group = match scalars.evaluation {
            true => Vec::new(),
            false => reader.groups(scalars.rollout_id, 1),
        };
        let group = group.into_iter().find(|group| group.group_id == scalars.group_id);
        let group = group.iter().flat_map(|group| &group.records).take(ROWS_MAX);
        let note = note(&reader, &record);
        let again = match scalars.evaluation {
            true => Vec::new(),
            false => again(&reader, scalars.group_id, &note, taken),
        };
        let (prompt, texts, untold) = self.texts(&reader, &record);
        let learned = taken.step_of(scalars.group_id, scalars.rollout_id).unwrap_or(scalars.rollout_id);
        let (known, _) = self.mismatches(&reader, Which::Learned, learned)?;
        json(&Shown {
            row: Row { why: note.dropped, ..row(&record, Which::Learned, &reader, &known) },
            step: scalars.rollout_id,
            set: scalars.evaluation.then(|| EvaluationNote::of(&record).set),
            source: note.source.map_or_else(String::new, String::from),
            label: note.label,
            prompt,
            prompt_tokens: record.prompt_len(),
            texts,
            untold,
            log_probs: record.log_probs().iter().take(TOKENS_MAX).copied().collect(),
            learner_log_probs: learner_log_probs(&reader, learned, record.position()),
            mask: record.loss_mask().iter().take(TOKENS_MAX).copied().collect(),
            spans: record.spans().iter().map(|span| (span.version, span.start, span.end)).collect(),
            group: group.map(|record| row(record, Which::Learned, &reader, &known)).collect(),
            again,
        })
    }

    /// The prompt, the texts of the answer's tokens, and why there are none.
    fn texts(&mut self, reader: &Reader, record: &Record) -> (Option<String>, Vec<String>, Option<String>) {
        let answer = &record.response()[..record.response().len().min(TOKENS_MAX)];
        let asked = &record.tokens()[..record.prompt_len().min(record.tokens().len()).min(TOKENS_MAX)];
        let told = self.tokenizer(reader).and_then(|tokenizer| {
            let prompt = tokenizer.decode(asked)?;
            Ok((prompt, pieces(answer, |tokens| tokenizer.decode(tokens))?))
        });
        match told {
            Ok((prompt, texts)) => (Some(prompt), texts, None),
            Err(error) => (None, answer.iter().map(i32::to_string).collect(), Some(error.to_string())),
        }
    }

    fn tokenizer(&mut self, reader: &Reader) -> Result<&Tokenizer> {
        if self.tokenizer.is_none() {
            self.tokenizer = Some(Texts::tokenizer(reader, &log_in(self.dir.clone()), None)?);
        }
        self.tokenizer.as_ref().ok_or_else(|| Error::usage("tokenizer", "one", "none"))
    }
}

impl Ask {
    /// Refuses what is not known of the answers that are asked for.
    fn check(&self) -> Result<()> {
        match (self.kind, &self.failure, self.mismatch_min) {
            (Which::All, _, Some(least)) => {
                let expected = "none with `kind` `all`: `mismatched` has the largest of all steps";
                Err(Error::usage("mismatch_min", expected, least))
            }
            (Which::LeftOut, ..) | (_, None, _) => Ok(()),
            (_, Some(failure), _) => Err(Error::usage("failure", "none but with `kind` `left_out`", failure)),
        }
    }

    pub(super) fn is_wanted(&self, answer: &Outline) -> bool {
        let is_within = |version| {
            let (oldest, newest) = answer.versions?;
            Some(oldest <= version && version <= newest)
        };
        self.reward_min.is_none_or(|least| answer.reward.is_some_and(|reward| reward >= least))
            && self.reward_max.is_none_or(|most| answer.reward.is_some_and(|reward| reward <= most))
            && self.length_min.is_none_or(|least| answer.tokens >= least)
            && self.length_max.is_none_or(|most| answer.tokens <= most)
            && self.version.is_none_or(|version| is_within(version).unwrap_or(false))
            && self.finish.as_ref().is_none_or(|wanted| wanted.is_empty() || *wanted == finish(answer.finish))
    }

    fn sort(&self, records: &mut [Record], known: &Mismatches) {
        let (reward, tokens) = (|one: &Record| one.scalars().reward, |one: &Record| one.response().len());
        match self.order {
            Order::Log => {}
            Order::Best => records.sort_by(|one, other| reward(other).total_cmp(&reward(one))),
            Order::Worst => records.sort_by(|one, other| reward(one).total_cmp(&reward(other))),
            Order::Longest => records.sort_by_key(|one| std::cmp::Reverse(tokens(one))),
            Order::Shortest => records.sort_by_key(tokens),
            Order::Mismatch => records.sort_by_key(|one| mismatch::rank(known.get(&one.position()))),
        }
    }
}

fn finish(finish: Finish) -> String {
    format!("{finish:?}").to_lowercase()
}

/// What the log says of the prompt of an answer; nothing where that is damaged.
fn note(reader: &Reader, record: &Record) -> PromptNote {
    if record.scalars().evaluation {
        return EvaluationNote::of(record).prompt;
    }
    let prompt = reader.prompt(record.scalars().group_id).ok().flatten();
    prompt.as_ref().map(PromptNote::of).unwrap_or_default()
}

/// What the learner said of an answer's tokens in a step; nothing where that is unknown or damaged, which lists tell.
fn learner_log_probs(reader: &Reader, step: u64, position: Position) -> Vec<f32> {
    let learned = reader.learned(step).ok().flatten();
    let mut log_probs = learned.and_then(|some| some.log_probs(position).ok().flatten()).unwrap_or_default();
    log_probs.truncate(TOKENS_MAX);
    log_probs
}

/// Why no step learns from a sample, if it is left out.
fn why(note: &PromptNote, record: &Record) -> Option<String> {
    note.failed_of(record).map_or_else(|| note.dropped.clone(), |failed| Some(failed.why.clone()))
}

fn row(record: &Record, kind: Which, reader: &Reader, known: &Mismatches) -> Row {
    let (reward, mismatch) = (record.scalars().reward, known.get(&record.position()));
    let (prompt_id, answer, part) = ids(record);
    let seconds = |from: i64, to: i64| (from > 0 && to >= from).then(|| (to - from) as f64 / 1e6);
    Row {
        position: record.position().0,
        prompt_id,
        answer,
        part,
        reward: record.is_scored().then_some(reward),
        raw_reward: record.rewards().first().copied().filter(|raw| *raw != reward),
        finish: finish(record.finish()),
        masked: record.verdict() == Verdict::Masked,
        tokens: record.response().len(),
        versions: record.versions(),
        engine: record.engine().to_owned(),
        seat: record.scalars().rollout_id,
        learned: mismatch.map(|mismatch| mismatch.step),
        mismatch: mismatch.map(|mismatch| mismatch.nats),
        seconds: record.times().first().zip(record.times().last()).and_then(|(from, to)| seconds(*from, *to)),
        why: if kind == Which::LeftOut { why(&note(reader, record), record) } else { None },
    }
}

/// What a list has, before it is filtered.
#[derive(Default)]
struct Picked {
    records: Vec<Record>,
    groups: usize,
    found: usize,
    /// Answers of all steps that the filter leaves, of which the first are here, and those that were looked at.
    total: Option<usize>,
    looked: Option<usize>,
    causes: BTreeMap<String, usize>,
    cut: bool,
}

/// The answers of the kind that is asked for. `numbers` are the groups that the step took.
fn pick(
    reader: &Reader,
    ask: &Ask,
    step: u64,
    numbers: Option<&[u64]>,
    known: &Mismatches,
) -> Result<Picked> {
    Ok(match ask.kind {
        Which::Learned => {
            let groups = match numbers {
                Some(numbers) => groups(reader, numbers)?,
                None => reader.groups(step, 1),
            };
            let (told, found) = (numbers.map_or(groups.len(), <[u64]>::len), groups.len());
            let records = groups.into_iter().flat_map(|group| group.records).collect();
            Picked { records, groups: told, found, ..Picked::default() }
        }
        Which::LeftOut => left_out(reader, step, ask.failure.as_deref()),
        Which::Evaluation => {
            let is_evaluated = |record: &Record| record.kind() == Kind::Sample && record.scalars().evaluation;
            let (records, .., cut) = apart(reader, step, is_evaluated);
            Picked { records, cut, ..Picked::default() }
        }
        Which::Mismatched => {
            let records = known.keys().filter_map(|position| reader.get(*position).ok().flatten());
            Picked { records: records.collect(), ..Picked::default() }
        }
        Which::All => {
            let outlines::Found { records, total, looked } = outlines::find(reader, ask);
            Picked { records, total: Some(total), looked: Some(looked), ..Picked::default() }
        }
    })
}

/// Answers of a step that none learns from, for this reason or any, and all groups of which that is so.
fn left_out(reader: &Reader, step: u64, failure: Option<&str>) -> Picked {
    let mut causes = BTreeMap::new();
    let is_wanted = |record: &Record| {
        let (scalars, kind) = (record.scalars(), record.kind());
        let (group, note) = match kind {
            Kind::Prompt => (scalars.sample_id, PromptNote::of(record)),
            Kind::Sample if !scalars.evaluation => (scalars.group_id, note(reader, record)),
            _ => return false,
        };
        let of_group = cause(&note);
        // The group of an answer that alone failed may be one that a step learns from.
        let failed = note.failed_of(record).filter(|_| kind == Kind::Sample);
        let cause = failed.map(|failed| failed.outcome.name().to_owned()).or_else(|| of_group.clone());
        of_group.map(|cause| causes.insert(group, cause));
        let is_wanted = |cause: String| failure.is_none_or(|wanted| wanted.is_empty() || *wanted == cause);
        kind == Kind::Sample && cause.is_some_and(is_wanted)
    };
    let (records, .., cut) = apart(reader, step, is_wanted);
    Picked { records, causes: outlines::count(causes.into_values()), cut, ..Picked::default() }
}

/// Answers of a step, those in no group too. The log is read where those of the step that are in one lie, or its end.
fn apart(
    reader: &Reader,
    step: u64,
    mut is_wanted: impl FnMut(&Record) -> bool,
) -> (Vec<Record>, usize, usize, bool) {
    let beside = SCANNED_MAX as u64 / 4;
    let groups = reader.groups(step, 1);
    let places = || groups.iter().flat_map(|group| &group.records).map(|record| record.position().0);
    let from = places().min().unwrap_or(reader.end().0).saturating_sub(beside).max(reader.oldest().0);
    let end = places().max().map_or(u64::MAX, |last| last.saturating_add(beside));
    let mut records = reader.iter(Position(from));
    let mut seen = 0;
    let mut found = Vec::new();
    for record in records.by_ref().take(SCANNED_MAX) {
        seen += 1;
        // What is damaged is told by `log verify`.
        let Ok(record) = record else { continue };
        if record.position().0 > end {
            break;
        }
        let Scalars { rollout_id, .. } = *record.scalars();
        if rollout_id == step && is_wanted(&record) {
            found.push(record);
        }
    }
    (found, 0, 0, seen == SCANNED_MAX)
}

/// The text of each token. A character that several tokens make stands at the last of them, and a token's text may depend
/// on the one before it.
fn pieces<E>(tokens: &[i32], decode: impl Fn(&[i32]) -> Result<String, E>) -> Result<Vec<String>, E> {
    let mut pieces = Vec::with_capacity(tokens.len());
    let mut begun: usize = 0;
    for end in 1..=tokens.len() {
        let before = begun.saturating_sub(1);
        let (head, all) = (decode(&tokens[before..begun])?, decode(&tokens[before..end])?);
        let is_open = all.ends_with('\u{fffd}') && end - begun < TOKENS_OF_CHARACTER && end < tokens.len();
        if is_open {
            pieces.push(String::new());
            continue;
        }
        pieces.push(match all.strip_prefix(&head) {
            Some(piece) => piece.to_owned(),
            None => decode(&tokens[begun..end])?,
        });
        begun = end;
    }
    Ok(pieces)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_of_a_text_join_to_it_and_wait_for_whole_characters() {
        // A token a byte, as some tokenizers fall back to.
        let text = "aé\u{1f600}b";
        let tokens: Vec<i32> = text.bytes().map(i32::from).collect();
        let decode = |tokens: &[i32]| {
            let bytes: Vec<u8> = tokens.iter().map(|token| *token as u8).collect();
            Ok::<_, ()>(String::from_utf8_lossy(&bytes).into_owned())
        };
        let pieces = pieces(&tokens, decode).expect("texts");
        assert_eq!(pieces, ["a", "", "é", "", "", "", "\u{1f600}", "b"]);
    }
}
