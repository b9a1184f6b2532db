use super::*;
use crate::ledger::Ledger;
use crate::options::LearnOptions;
use crate::sample::{Trajectory, sample_id};
use driftless_bridge::engine::{Finish, ReplyDigest, VersionSpan as Spoken};
use driftless_bridge::{Generation, Label, Rid};
use driftless_buffer::sample::{ColumnId, Element};
use driftless_buffer::{Identity, Log as Written, Options, Sample, Scalars, SyncPolicy};

/// Answers of a group.
const ANSWERS: u64 = 2;

/// A sample on its way into the log.
#[derive(Clone)]
struct Drawn {
    id: u64,
    parts: u16,
    trajectory: Trajectory,
    /// The column, if there is one.
    replies: Option<Vec<u8>>,
}

/// What an engine replied, with a version for each token.
fn generation(answer: u64, input_ids: &[i32], tokens: &[(i32, u64)]) -> Generation {
    let label = |version| Label::new("0123456789ab", version).unwrap().to_string();
    let spans = tokens.iter().enumerate().map(|(at, (_, version))| Spoken {
        label: label(*version),
        start: at as u32,
        end: at as u32 + 1,
    });
    let generation = Generation {
        rid: Rid::new(1, answer),
        engine: "e".into(),
        output_ids: tokens.iter().map(|(id, _)| *id).collect(),
        log_probs: tokens.iter().map(|(id, _)| -(*id as f32) / 8.0).collect(),
        spans: spans.collect(),
        spans_reported: true,
        finish: Finish::Stop,
        retractions: 0,
        cached_tokens: None,
        replies: Vec::new(),
    };
    generation.digested(input_ids)
}

/// An answer of two turns around a tool's tokens 90 and 91, as one sample, and another of the first turn's begin alone.
fn answer(number: u64) -> Vec<Drawn> {
    let id = number as i32;
    let first = generation(number, &[70, 71], &[(10 + id, 0), (11, 0), (12, 1)]);
    let read = [70, 71, 10 + id, 11, 12, 90, 91];
    let second = generation(number, &read, &[(20 + id, 1), (21, 1)]);
    let mut both = Trajectory::new([&read[..], &[20 + id, 21]].concat(), 2);
    both.take(&[70, 71], &first);
    both.take(&read, &second);
    let mut begin = Trajectory::new(vec![70, 71, 10 + id, 11], 2);
    begin.take(&[70, 71], &first);
    let drawn = |(part, trajectory): (usize, Trajectory)| {
        let replies = trajectory.replies.iter().flat_map(ReplyDigest::to_bytes).collect();
        Drawn { id: sample_id(number, part), parts: 2, trajectory, replies: Some(replies) }
    };
    [both, begin].into_iter().enumerate().map(drawn).collect()
}

/// A run of two steps with a group each, whose samples, groups and ledger were changed before they were written.
struct Scene {
    samples: Vec<Drawn>,
    /// What the digests in the ledger are of, if the samples were changed behind it.
    learned: Option<Vec<Drawn>>,
    groups: Vec<Vec<u64>>,
    versions: &'static str,
}

impl Scene {
    fn new() -> Self {
        let samples = (0..2 * ANSWERS).flat_map(answer).collect();
        let versions = "{\"version\":0,\"step\":0}\n{\"version\":1,\"step\":0}\n";
        Scene { samples, learned: None, groups: vec![vec![0], vec![1]], versions }
    }

    fn report(&self) -> Report {
        let dir = tempfile::tempdir().unwrap();
        let log = write(&dir.path().join("log"), &self.samples);
        let other = self.learned.as_ref().map(|learned| write(&dir.path().join("other"), learned));
        let mut ledger = Ledger::open(dir.path()).unwrap();
        for (step, groups) in self.groups.iter().enumerate() {
            let reader = other.as_ref().unwrap_or(&log).reader();
            let mut records: Vec<Record> = reader.iter(Position(0)).map(Result::unwrap).collect();
            records.retain(|record| groups.contains(&record.scalars().group_id));
            records.sort_by_key(|record| (record.scalars().group_id, record.scalars().sample_id));
            let digests = records.iter().map(ledger::digest).collect();
            let learn = LearnOptions::default();
            let recipe = ledger::Recipe {
                learn,
                temperature: 1.0,
                n_samples_per_prompt: ANSWERS,
                max_staleness: None,
                learner: None,
            };
            ledger.note(step as u64, groups, digests, recipe).unwrap();
        }
        std::fs::write(dir.path().join("versions.jsonl"), self.versions).unwrap();
        verify(dir.path(), &dir.path().join("log")).unwrap()
    }

    /// The names of what is wrong once a sample of group 1 is changed that the ledger knew.
    fn damaged(change: impl FnOnce(&mut Vec<Drawn>)) -> Vec<String> {
        let mut scene = Scene::new();
        scene.learned = Some(scene.samples.clone());
        change(&mut scene.samples);
        let report = scene.report();
        assert_eq!(report.faults, report.first.len() as u64);
        report.first.iter().map(ToString::to_string).collect()
    }
}

fn write(dir: &Path, samples: &[Drawn]) -> Written {
    let identity = Identity { run_id: [1; 16], model: "policy".into(), tokenizer_digest: [0; 32] };
    let options = Options::new(identity).with_sync(SyncPolicy::Manual).with_segment_bytes(1 << 20);
    let log = Written::open(dir, options).unwrap();
    let replies = samples.iter().map(|drawn| drawn.replies.iter());
    let extra =
        replies.map(|one| one.map(|replies| (ColumnId::REPLIES, Element::U8, &replies[..])).collect());
    let extra: Vec<Vec<_>> = extra.collect();
    let records = samples.iter().zip(&extra).map(|(drawn, extra)| {
        let Drawn { id, parts, trajectory, .. } = drawn;
        let group_id = answer_of(*id) / ANSWERS;
        Sample {
            scalars: Scalars { sample_id: *id, group_id, parts: *parts, ..Scalars::default() },
            prompt_len: trajectory.prompt_len,
            tokens: &trajectory.tokens,
            log_probs: &trajectory.log_probs,
            loss_mask: &trajectory.loss_mask,
            spans: &trajectory.spans,
            extra,
            ..Sample::default()
        }
    });
    log.append_all(&records.collect::<Vec<_>>()).unwrap();
    log
}

/// The sample of this part of answer 3, which is in group 1 and step 1.
fn part(samples: &mut [Drawn], part: usize) -> &mut Drawn {
    samples.iter_mut().find(|drawn| drawn.id == sample_id(3, part)).unwrap()
}

#[test]
fn sound_run_is_verified_and_counted() {
    let report = Scene::new().report();
    assert_eq!(report.first, []);
    let Report { steps, groups, answers, samples, replies, tokens, samples_learned, .. } = report;
    assert_eq!((steps, groups, answers, samples, samples_learned), (2, 2, 4, 8, 8));
    assert_eq!((replies, tokens), (4 * 3, 4 * (3 + 2 + 2)));
    let Unchecked { earlier_release, removed, steps_without_version, .. } = report.unchecked;
    assert_eq!((earlier_release, removed, steps_without_version), (0, 0, 0));
}

#[test]
fn whatever_is_changed_of_a_trained_token_is_named() {
    let reply = "position 6, answer 3, part 0, response tokens 0..3: digest of the reply's ids";
    let behind = "position 6, answer 3, part 0, response tokens 5..7: ids before the reply";
    let found = Scene::damaged(|samples| part(samples, 0).trajectory.tokens[3] = 99);
    assert!(found[0].contains(reply) && found[1].contains(behind), "{found:?}");
    let found = Scene::damaged(|samples| {
        let log_prob = &mut part(samples, 0).trajectory.log_probs[1];
        *log_prob = f32::from_bits(log_prob.to_bits() ^ 1);
    });
    assert!(found[0].contains(reply), "{found:?}");
    let found = Scene::damaged(|samples| part(samples, 0).trajectory.spans[2].version = 0);
    assert!(found[0].contains(reply), "{found:?}");
    let found = Scene::damaged(|samples| part(samples, 0).trajectory.tokens[7] = 99);
    assert!(
        found[0].contains("part 0, response tokens 3..5") || found[0].contains("tokens 5..7"),
        "{found:?}"
    );
    // All of these change what the ledger has of the sample, too.
    assert!(found.iter().any(|fault| fault.contains("ledger.jsonl")), "{found:?}");
}

#[test]
fn trained_token_of_no_engine_is_named() {
    let found = Scene::damaged(|samples| part(samples, 0).trajectory.loss_mask[4] = 1);
    let expected =
        "step 1, group 1, position 6, answer 3, part 0, response tokens 4..5: tokens that are trained on";
    assert!(found[0].contains(expected), "{found:?}");
    // One that is not trained on any more is the ledger's to find.
    let found = Scene::damaged(|samples| part(samples, 0).trajectory.loss_mask[1] = 0);
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(
        found[0].contains("position 6, answer 3, part 0: digest of the sample in ledger.jsonl"),
        "{found:?}"
    );
    // A loop that trained on it would have noted it likewise.
    let mut scene = Scene::new();
    part(&mut scene.samples, 0).trajectory.loss_mask[3..5].fill(1);
    let report = scene.report();
    assert_eq!((report.faults, report.first[0].tokens), (1, Some([3, 5])));
}

#[test]
fn reply_of_another_place_or_answer_is_named() {
    // The two replies of a sample, each with the other's digest.
    let found = Scene::damaged(|samples| {
        let replies = part(samples, 0).replies.as_mut().unwrap();
        let (first, second) = replies.split_at_mut(ReplyDigest::BYTES);
        first[8..].swap_with_slice(&mut second[8..]);
    });
    assert!(found.len() == 2 && found[0].contains("ids before the reply"), "{found:?}");
    // All that answer 2 is, as answer 3.
    let found = Scene::damaged(|samples| {
        let other = samples.iter().find(|drawn| drawn.id == sample_id(2, 0)).unwrap().clone();
        *part(samples, 0) = Drawn { id: sample_id(3, 0), ..other };
    });
    assert!(found[0].contains("reply: expected of answer 3, found of answer 2"), "{found:?}");
    let found = Scene::damaged(|samples| part(samples, 0).replies.as_mut().unwrap().truncate(50));
    assert!(found[0].contains("digests of replies: expected entries of 56 bytes"), "{found:?}");
}

#[test]
fn answers_twice_or_not_at_all_are_named() {
    let mut scene = Scene::new();
    scene.groups = vec![vec![0, 1], vec![1]];
    let report = scene.report();
    let words = report.first[0].to_string();
    assert_eq!(report.faults, 1);
    assert_eq!(
        words,
        "step 1, group 1: group: expected one that no other step learned from, found one of step 0"
    );
    // A sample of an answer, then an answer.
    for gone in [&[sample_id(3, 1)][..], &[sample_id(3, 0), sample_id(3, 1)]] {
        let found = Scene::damaged(|samples| samples.retain(|drawn| !gone.contains(&drawn.id)));
        let expected = "step 1, group 1: whole answers of the group in the log: expected 2, found 1";
        assert_eq!(found, [expected]);
    }
    // What a later record replaces was not learned from.
    let found = Scene::damaged(|samples| {
        let mut earlier = part(samples, 0).clone();
        earlier.trajectory.tokens[3] = 99;
        samples.insert(0, earlier);
    });
    assert_eq!(found, [""; 0]);
}

#[test]
fn weights_newer_than_their_step_are_named() {
    let mut scene = Scene::new();
    scene.versions = "{\"version\":0,\"step\":0}\n{\"version\":1,\"step\":1}\n";
    let report = scene.report();
    let first = &report.first[0];
    assert_eq!((report.faults, first.step, first.tokens), (2, 0, Some([2, 3])));
    assert!(first.to_string().contains("at most 0, the newest version before the step, found 1"), "{first}");
    scene.versions = "";
    let report = scene.report();
    assert_eq!((report.faults, report.unchecked.steps_without_version), (0, 2));
}

#[test]
fn samples_of_an_earlier_release_are_counted_apart() {
    let mut scene = Scene::new();
    part(&mut scene.samples, 0).replies = None;
    let report = scene.report();
    assert_eq!((report.faults, report.unchecked.earlier_release, report.unchecked.tokens), (0, 1, 5));
    assert_eq!((report.replies, report.tokens), (4 * 3 - 2, 4 * 7 - 5));
    // A version that did not exist is seen without a digest.
    part(&mut scene.samples, 0).trajectory.spans.last_mut().unwrap().version = 9;
    assert_eq!(scene.report().faults, 1);
}
