use super::*;
use driftless_bridge::engine::{Finish, ReplyDigest, VersionSpan as Spoken};
use driftless_bridge::{Generation, Label, Rid};
use driftless_buffer::sample::{ColumnId, Element};
use driftless_buffer::{Identity, Log as Written, Options, PromptState, Sample, SyncPolicy, VersionSpan};

/// Answers of a group.
const ANSWERS: u64 = 2;

/// A sample on its way into the log.
#[derive(Clone, Default)]
struct Drawn {
    id: u64,
    tokens: Vec<i32>,
    log_probs: Vec<f32>,
    loss_mask: Vec<u8>,
    spans: Vec<VersionSpan>,
    /// The column, if there is one.
    replies: Option<Vec<u8>>,
}

/// What an engine replied, with a version for each token.
fn generation(answer: u64, input_ids: &[i32], tokens: &[(i32, u64)]) -> Generation {
    let label = |version| Label::new("0123456789ab", version).unwrap().to_string();
    let spans = tokens.iter().zip(0..).map(|((_, version), start)| Spoken {
        label: label(*version),
        start,
        end: start + 1,
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

/// Prompt of each sample.
const PROMPT: [i32; 2] = [70, 71];

impl Drawn {
    fn new(answer: u64, part: u64) -> Self {
        let id = answer + part * Scalars::ANSWERS_MAX;
        Drawn { id, tokens: PROMPT.to_vec(), replies: Some(Vec::new()), ..Drawn::default() }
    }

    /// Puts what an engine drew behind all that is there.
    fn draw(&mut self, answer: u64, tokens: &[(i32, u64)], mask: u8) {
        let drawn = generation(answer, &self.tokens, tokens);
        let start = self.loss_mask.len() as u32;
        let end = start + tokens.len() as u32;
        let replies = drawn.replies.iter().map(|reply| ReplyDigest { start, end, ..*reply }.to_bytes());
        self.replies.iter_mut().for_each(|column| column.extend(replies.clone().flatten()));
        let spans = tokens.iter().zip(start..);
        self.spans.extend(spans.map(|((_, version), at)| VersionSpan {
            start: at,
            end: at + 1,
            version: *version,
        }));
        self.push(&drawn.output_ids, &drawn.log_probs, mask);
    }

    fn push(&mut self, ids: &[i32], log_probs: &[f32], mask: u8) {
        self.tokens.extend(ids);
        self.log_probs.extend(log_probs);
        self.loss_mask.resize(self.log_probs.len(), mask);
    }
}

/// An answer of two turns around a tool's tokens 90 and 91, as one sample, and another of the first turn's begin alone, which
/// trains on none of it again.
fn answer(number: u64) -> [Drawn; 2] {
    let id = number as i32;
    let mut both = Drawn::new(number, 0);
    both.draw(number, &[(10 + id, 0), (11, 0), (12, 1)], 1);
    both.push(&[90, 91], &[0.0; 2], 0);
    both.draw(number, &[(20 + id, 1), (21, 1)], 1);
    let mut begin = Drawn::new(number, 1);
    begin.draw(number, &[(10 + id, 0), (11, 0)], 0);
    [both, begin]
}

/// A run of two steps with a group each, whose samples, groups and ledger were changed before they were written.
struct Scene {
    samples: Vec<Drawn>,
    /// What the digests in the ledger are of, if the samples were changed behind it.
    learned: Option<Vec<Drawn>>,
    groups: Vec<Vec<u64>>,
    versions: &'static str,
    /// What the prompt of group 1 says, if the log has one.
    note: Option<&'static str>,
}

impl Scene {
    fn new() -> Self {
        let samples = (0..2 * ANSWERS).flat_map(answer).collect();
        let versions = "{\"version\":0,\"step\":0}\n{\"version\":1,\"step\":0}\n";
        Scene { samples, learned: None, groups: vec![vec![0], vec![1]], versions, note: None }
    }

    fn report(&self) -> Report {
        let dir = tempfile::tempdir().unwrap();
        let log = write(&dir.path().join("log"), &self.samples);
        let scalars =
            Scalars { sample_id: 1, group_id: 1, status: PromptState::Done.code(), ..Scalars::default() };
        let prompt = self.note.map(|note| Sample {
            kind: Kind::Prompt,
            scalars,
            metadata: note.as_bytes(),
            ..Sample::default()
        });
        log.append_all(prompt.as_slice()).unwrap();
        let other = self.learned.as_ref().map(|learned| write(&dir.path().join("other"), learned));
        let mut ledger = String::new();
        for (step, groups) in self.groups.iter().enumerate() {
            let reader = other.as_ref().unwrap_or(&log).reader();
            let mut records: Vec<Record> = reader.iter(Position(0)).map(Result::unwrap).collect();
            records.retain(|record| {
                record.kind() == Kind::Sample && groups.contains(&record.scalars().group_id)
            });
            records.sort_by_key(|record| (record.scalars().group_id, record.scalars().sample_id));
            let samples: Vec<_> = records.iter().map(digest::of_sample).collect();
            let recipe = serde_json::json!({ "n_samples_per_prompt": ANSWERS });
            let line =
                serde_json::json!({ "step": step, "groups": groups, "samples": samples, "recipe": recipe });
            ledger += &format!("{line}\n");
        }
        std::fs::write(dir.path().join("ledger.jsonl"), ledger).unwrap();
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
        let group_id = answer_of(drawn.id) / ANSWERS;
        Sample {
            scalars: Scalars { sample_id: drawn.id, group_id, parts: 2, ..Scalars::default() },
            prompt_len: PROMPT.len(),
            tokens: &drawn.tokens,
            log_probs: &drawn.log_probs,
            loss_mask: &drawn.loss_mask,
            spans: &drawn.spans,
            extra,
            ..Sample::default()
        }
    });
    log.append_all(&records.collect::<Vec<_>>()).unwrap();
    log
}

/// The sample of this part of answer 3, which is in group 1 and step 1.
fn part(samples: &mut [Drawn], part: u64) -> &mut Drawn {
    samples.iter_mut().find(|drawn| drawn.id == 3 + part * Scalars::ANSWERS_MAX).unwrap()
}

#[test]
fn sound_run_is_verified_and_counted() {
    let report = Scene::new().report();
    assert_eq!(report.first, []);
    let Report { steps, groups, answers, samples, replies, tokens, samples_learned, .. } = report;
    assert_eq!((steps, groups, answers, samples, samples_learned), (2, 2, 4, 8, 8));
    assert_eq!((replies, tokens), (4 * 3, 4 * (3 + 2)));
    let Unchecked { earlier_release, removed, steps_without_version, .. } = report.unchecked;
    assert_eq!((earlier_release, removed, steps_without_version), (0, 0, 0));
}

#[test]
fn whatever_is_changed_of_a_trained_token_is_named() {
    let reply = "position 6, answer 3, part 0, response tokens 0..3: digest of the reply's ids";
    let behind = "position 6, answer 3, part 0, response tokens 5..7: ids before the reply";
    let found = Scene::damaged(|samples| part(samples, 0).tokens[3] = 99);
    assert!(found[0].contains(reply) && found[1].contains(behind), "{found:?}");
    let found = Scene::damaged(|samples| {
        let log_prob = &mut part(samples, 0).log_probs[1];
        *log_prob = f32::from_bits(log_prob.to_bits() ^ 1);
    });
    assert!(found[0].contains(reply), "{found:?}");
    let found = Scene::damaged(|samples| part(samples, 0).spans[2].version = 0);
    assert!(found[0].contains(reply), "{found:?}");
    let found = Scene::damaged(|samples| part(samples, 0).tokens[7] = 99);
    assert!(
        found[0].contains("part 0, response tokens 3..5") || found[0].contains("tokens 5..7"),
        "{found:?}"
    );
    // All of these change what the ledger has of the sample, too.
    assert!(found.iter().any(|fault| fault.contains("ledger.jsonl")), "{found:?}");
}

#[test]
fn trained_token_of_no_engine_is_named() {
    let found = Scene::damaged(|samples| part(samples, 0).loss_mask[4] = 1);
    let expected =
        "step 1, group 1, position 6, answer 3, part 0, response tokens 4..5: tokens that are trained on";
    assert!(found[0].contains(expected), "{found:?}");
    // One that is not trained on any more is the ledger's to find.
    let found = Scene::damaged(|samples| part(samples, 0).loss_mask[1] = 0);
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(
        found[0].contains("position 6, answer 3, part 0: digest of the sample in ledger.jsonl"),
        "{found:?}"
    );
    // A loop that trained on it would have noted it likewise.
    let mut scene = Scene::new();
    part(&mut scene.samples, 0).loss_mask[3..5].fill(1);
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
        let other = samples.iter().find(|drawn| drawn.id == 2).unwrap().clone();
        *part(samples, 0) = Drawn { id: 3, ..other };
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
    for gone in [&[3 + Scalars::ANSWERS_MAX][..], &[3, 3 + Scalars::ANSWERS_MAX]] {
        let found = Scene::damaged(|samples| samples.retain(|drawn| !gone.contains(&drawn.id)));
        let expected = "step 1, group 1: whole answers of the group in the log: expected 2, found 1";
        assert_eq!(found, [expected]);
    }
    // One that failed was never in the log, and its group's prompt says so.
    let mut scene = Scene::new();
    scene.samples.retain(|drawn| answer_of(drawn.id) != 3);
    scene.note = Some(r#"{"failed": [{"answer": 3, "outcome": "parser", "why": "so"}]}"#);
    let report = scene.report();
    assert_eq!((report.first, report.answers), (vec![], 3));
    // What a later record replaces was not learned from.
    let found = Scene::damaged(|samples| {
        let mut earlier = part(samples, 0).clone();
        earlier.tokens[3] = 99;
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
    assert_eq!((report.replies, report.tokens), (4 * 3 - 2, 4 * 5 - 5));
    // A version that did not exist is seen without a digest.
    part(&mut scene.samples, 0).spans.last_mut().unwrap().version = 9;
    assert_eq!(scene.report().faults, 1);
}

#[test]
fn token_that_two_samples_of_an_answer_train_on_is_named() {
    let mut scene = Scene::new();
    part(&mut scene.samples, 1).loss_mask = vec![0, 1];
    let report = scene.report();
    assert_eq!(report.faults, 1);
    assert_eq!(
        report.first[0].to_string(),
        "step 1, group 1, position 7, answer 3, part 1, response tokens 0..2: tokens that are trained on: expected each once, \
         found 1 that another sample of the answer trains on"
    );
    // The first sample may leave it to the second.
    part(&mut scene.samples, 0).loss_mask[1] = 0;
    assert_eq!(scene.report().first, []);
}

#[test]
fn entries_are_read_as_the_writer_has_them() {
    for (number, attempts) in [(0, 0), (3, 1), (Scalars::ANSWERS_MAX - 1, 2)] {
        let rid = (0..attempts).fold(Rid::new(u64::MAX, number), |rid, _| rid.next_attempt());
        let written = ReplyDigest { rid, start: 1, end: u32::MAX, context: 1 << 63, digest: u128::MAX - 5 };
        let read = digest::Reply::from_bytes(&written.to_bytes()).unwrap();
        assert_eq!((read.start, read.end, read.context), (written.start, written.end, written.context));
        assert_eq!((read.digest, read.rid()), (written.digest, rid.to_string()));
    }
    assert_eq!(digest::Reply::from_bytes(&[0; 55]), None);
    assert_eq!(digest::Reply::from_bytes(&[255; 56]), None, "no such attempt");
}
