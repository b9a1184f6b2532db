//! `ledger.jsonl`: what each optimiser step learned from and how, in the run's own directory.
//!
//! A line is written before its step begins. A run that goes on learns from the same groups again, whatever else has
//! finished meanwhile. Where a step stands twice, the later line counts.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use driftless_buffer::Record;
use driftless_buffer::sample::ColumnId;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::Result;
use crate::lines::{self, Lines, Opened};
use crate::options::LearnOptions;

/// Its name.
pub const FILE: &str = "ledger.jsonl";
/// Hex digits of a sample's digest: enough to find a change, and short beside the sample.
const DIGEST_DIGITS: usize = 16;

/// How a step learned: with the samples, all that its result follows from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Recipe {
    /// What advantages, loss and optimiser were told.
    pub learn: LearnOptions,
    /// Temperature of the rollouts.
    pub temperature: f64,
    /// Samples of a prompt.
    pub n_samples_per_prompt: u64,
    /// Tokens of weights that were more steps older were not trained on; all were, if `None`.
    pub max_staleness: Option<u64>,
    /// [`Learner::settings`](crate::learner::Learner::settings).
    pub learner: Option<Value>,
}

/// A line of the file.
#[derive(Serialize, Deserialize)]
struct Line {
    step: u64,
    groups: Vec<u64>,
    /// [`digest`] of each sample. Runs of earlier releases have none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    samples: Vec<String>,
    /// Absent where it is that of the line before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    recipe: Option<Recipe>,
}

/// What a step learned from.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Learned {
    pub(crate) groups: Vec<u64>,
    /// [`digest`] of each sample.
    pub(crate) samples: Vec<String>,
    /// Unknown of runs of earlier releases.
    pub(crate) recipe: Option<Arc<Recipe>>,
}

/// The ledger of a run that goes on.
#[derive(Debug)]
pub(crate) struct Ledger {
    lines: Lines,
    steps: BTreeMap<u64, Learned>,
    /// That of the last line.
    recipe: Option<Arc<Recipe>>,
}

impl Ledger {
    /// Reads it, or begins it.
    pub(crate) fn open(save: &Path) -> Result<Self> {
        let Opened { lines, said } = Lines::open(save.join(FILE))?;
        let (steps, recipe) = by_step(said);
        Ok(Ledger { lines, steps, recipe })
    }

    /// The groups of each step.
    pub(crate) fn groups(&self) -> BTreeMap<u64, Vec<u64>> {
        groups(&self.steps)
    }

    /// Makes durable that `step` learns from these groups and samples in this way.
    pub(crate) fn note(
        &mut self,
        step: u64,
        groups: &[u64],
        samples: Vec<String>,
        recipe: Recipe,
    ) -> Result<()> {
        let recipe = self.recipe.clone().filter(|last| **last == recipe).unwrap_or_else(|| recipe.into());
        let learned = Learned { groups: groups.to_vec(), samples, recipe: Some(recipe.clone()) };
        if self.steps.get(&step) == Some(&learned) {
            return Ok(());
        }
        let is_new = self.recipe.as_ref() != Some(&recipe);
        let Learned { groups, samples, .. } = learned.clone();
        self.lines.append(&Line { step, groups, samples, recipe: is_new.then(|| Recipe::clone(&recipe)) })?;
        self.lines.sync()?;
        // No earlier step is done again by this process.
        let before = self.steps.range_mut(..step).rev().map(|(_, learned)| &mut learned.samples);
        before.take_while(|samples| !samples.is_empty()).for_each(|samples| *samples = Vec::new());
        self.steps.insert(step, learned);
        self.recipe = Some(recipe);
        Ok(())
    }
}

/// The ledger of a run that another process trains.
#[derive(Debug)]
pub(crate) struct Tail(lines::Tail);

impl Tail {
    /// From the first step on.
    pub(crate) fn new(save: &Path) -> Self {
        Tail(lines::Tail::new(save.join(FILE)))
    }

    /// The groups of the steps that were written down since the last call.
    pub(crate) fn next(&mut self) -> Result<BTreeMap<u64, Vec<u64>>> {
        Ok(groups(&by_step(self.0.next()?).0))
    }
}

/// The groups that each step of the run in `save` learned from. Runs of releases before it have none.
///
/// # Errors
/// [`crate::Error::Io`] with the path.
pub fn read(save: &Path) -> Result<BTreeMap<u64, Vec<u64>>> {
    Ok(groups(&learned(save)?))
}

/// What each step of the run in `save` learned from, and how.
pub(crate) fn learned(save: &Path) -> Result<BTreeMap<u64, Learned>> {
    Ok(by_step(lines::read(&save.join(FILE))?).0)
}

/// Says of a sample what a step learns from: its ids, tokens, log-probs, masks, versions and reward.
pub(crate) fn digest(record: &Record) -> String {
    const COLUMNS: [ColumnId; 5] = [
        ColumnId::TOKENS,
        ColumnId::LOG_PROBS,
        ColumnId::LOSS_MASK,
        ColumnId::SPANS,
        ColumnId::TEACHER_LOG_PROBS,
    ];
    let (scalars, mut hasher) = (record.scalars(), blake3::Hasher::new());
    let (reward, verdict) = (scalars.reward.to_bits(), record.verdict().code());
    let numbers = [scalars.sample_id, scalars.group_id, record.prompt_len() as u64];
    for number in numbers.into_iter().chain([reward.into(), verdict.into()]) {
        hasher.update(&number.to_le_bytes());
    }
    for column in COLUMNS {
        let bytes = record.column(column).map_or(&[][..], |(_, bytes)| bytes);
        hasher.update(&(bytes.len() as u64).to_le_bytes()).update(bytes);
    }
    hasher.finalize().to_hex()[..DIGEST_DIGITS].to_owned()
}

fn groups(steps: &BTreeMap<u64, Learned>) -> BTreeMap<u64, Vec<u64>> {
    steps.iter().map(|(step, learned)| (*step, learned.groups.clone())).collect()
}

/// What each step learned from, and the last recipe.
fn by_step(lines: Vec<Line>) -> (BTreeMap<u64, Learned>, Option<Arc<Recipe>>) {
    let (mut steps, mut last) = (BTreeMap::new(), None);
    for Line { step, groups, samples, recipe } in lines {
        last = recipe.map(Arc::new).or(last);
        // A line without samples is of an earlier release, which knew no recipe.
        let recipe = last.clone().filter(|_| !samples.is_empty());
        steps.insert(step, Learned { groups, samples, recipe });
    }
    (steps, last)
}

#[cfg(test)]
mod tests {
    use super::*;
    use driftless_buffer::{Identity, Log, Options, Position, Sample, Scalars, VersionSpan};

    fn recipe(lr: f64) -> Recipe {
        let learn = LearnOptions::default().with_lr(lr);
        Recipe { learn, temperature: 1.0, n_samples_per_prompt: 2, max_staleness: Some(1), learner: None }
    }

    fn samples(groups: &[u64]) -> Vec<String> {
        groups.iter().map(u64::to_string).collect()
    }

    #[test]
    fn later_line_of_a_step_counts_and_a_torn_one_does_not() {
        let dir = tempfile::tempdir().unwrap();
        let mut ledger = Ledger::open(dir.path()).unwrap();
        let note = |ledger: &mut Ledger, step, groups: &[u64]| {
            ledger.note(step, groups, samples(groups), recipe(0.5)).unwrap();
        };
        note(&mut ledger, 0, &[0, 2]);
        note(&mut ledger, 1, &[1, 3]);
        let path = dir.path().join(FILE);
        let mut torn = std::fs::File::options().append(true).open(&path).unwrap();
        std::io::Write::write_all(&mut torn, b"{\"step\":2,\"gro").unwrap();
        let mut ledger = Ledger::open(dir.path()).unwrap();
        note(&mut ledger, 1, &[3, 4]);
        note(&mut ledger, 1, &[3, 4]);
        let held: Vec<_> = ledger.steps.values().map(|learned| learned.samples.len()).collect();
        assert_eq!(held, [0, 2], "digests of steps that are over are in the file alone");
        assert_eq!(read(dir.path()).unwrap(), [(0, vec![0, 2]), (1, vec![3, 4])].into());
        assert_eq!(std::fs::read_to_string(&path).unwrap().lines().count(), 4);
    }

    #[test]
    fn recipe_is_written_where_it_changed_and_holds_until_then() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(FILE);
        std::fs::write(&path, "{\"step\":0,\"groups\":[7]}\n").unwrap();
        for (steps, lr) in [(1..3, 0.5), (3..5, 0.5), (4..6, 0.25)] {
            let mut ledger = Ledger::open(dir.path()).unwrap();
            for step in steps {
                ledger.note(step, &[step], samples(&[step]), recipe(lr)).unwrap();
            }
        }
        let rate = |learned: &Learned| learned.recipe.as_ref().map(|recipe| recipe.learn.lr);
        let rates: Vec<_> = learned(dir.path()).unwrap().values().map(rate).collect();
        let expected = [None, Some(0.5), Some(0.5), Some(0.5), Some(0.25), Some(0.25)];
        assert_eq!(rates, expected, "step 4 was done again with another rate");
        let text = std::fs::read_to_string(&path).unwrap();
        assert_eq!(text.matches("recipe").count(), 2, "{text}");
    }

    #[test]
    fn digest_says_what_a_step_learns_from_and_no_more() {
        let digest_of = |change: &dyn Fn(&mut Sample<'static>)| {
            let dir = tempfile::tempdir().unwrap();
            let identity = Identity { run_id: [1; 16], model: "policy".into(), tokenizer_digest: [0; 32] };
            let log = Log::open(dir.path(), Options::new(identity)).unwrap();
            let mut sample = Sample {
                prompt_len: 1,
                tokens: &[1, 2, 3],
                log_probs: &[-1.0, -2.0],
                loss_mask: &[1, 1],
                spans: &[VersionSpan { start: 0, end: 2, version: 3 }],
                ..Sample::default()
            };
            change(&mut sample);
            log.append(&sample).unwrap().wait().unwrap();
            digest(&log.reader().get(Position(0)).unwrap().unwrap())
        };
        let plain = digest_of(&|_| {});
        assert_eq!(plain.len(), DIGEST_DIGITS);
        let renamed = digest_of(&|sample| (sample.engine, sample.metadata) = ("e", b"m"));
        assert_eq!(renamed, plain);
        let changes: [&dyn Fn(&mut Sample<'static>); 6] = [
            &|sample| sample.tokens = &[1, 2, 4],
            &|sample| sample.log_probs = &[-1.0, -2.5],
            &|sample| sample.loss_mask = &[1, 0],
            &|sample| sample.spans = &[VersionSpan { start: 0, end: 2, version: 4 }],
            &|sample| sample.scalars = Scalars { reward: 1.0, ..sample.scalars },
            &|sample| sample.scalars = Scalars { group_id: 1, ..sample.scalars },
        ];
        for (index, change) in changes.into_iter().enumerate() {
            assert_ne!(digest_of(change), plain, "change {index}");
        }
    }
}
