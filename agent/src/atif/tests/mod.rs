//! What is written passes the check, and nothing that was changed does.

use std::borrow::Cow;
use std::convert::Infallible;

use driftless_bridge::Rid;
use driftless_bridge::engine::{Digester, ReplyDigest, context};
use proptest::prelude::*;
use serde_json::json;

use super::{Agent, Checker, Message, Metrics, Report, Sampled, Source, Trajectory, VERSION};
use crate::Tokenizer;

/// A document of one sample, two turns of it, as it was written first.
const GOLDEN: &str = include_str!("golden.json");
/// A document as harnesses write them that know their tokens partly.
const FOREIGN: &str = include_str!("foreign.json");

/// Tokens that one engine drew in one reply, or that nobody drew.
#[derive(Debug, Clone)]
struct Piece {
    is_drawn: bool,
    is_trained: bool,
    version: u64,
    tokens: Vec<(i32, f32)>,
}

/// A sample with all that the log has of it.
#[derive(Debug, Clone)]
struct Made {
    tokens: Vec<i32>,
    prompt_len: usize,
    log_probs: Vec<f32>,
    loss_mask: Vec<u8>,
    spans: Vec<(u64, u32, u32)>,
    replies: Vec<ReplyDigest>,
}

impl Made {
    fn of(prompt: &[i32], pieces: &[Piece]) -> Self {
        let (tokens, prompt_len) = (prompt.to_vec(), prompt.len());
        let mut made =
            Made { tokens, prompt_len, log_probs: vec![], loss_mask: vec![], spans: vec![], replies: vec![] };
        for (nth, piece) in (0..).zip(pieces) {
            let (start, end) =
                (made.log_probs.len() as u32, (made.log_probs.len() + piece.tokens.len()) as u32);
            if piece.is_drawn {
                let (rid, before) = (Rid::new(7, 1).generation(nth), context(0, &made.tokens));
                let mut digester = Digester::new(rid, before);
                piece
                    .tokens
                    .iter()
                    .for_each(|(id, log_prob)| digester.push(*id, *log_prob, Some(piece.version)));
                made.spans.push((piece.version, start, end));
                made.replies.push(ReplyDigest {
                    rid,
                    start,
                    end,
                    context: before,
                    digest: digester.digest(),
                });
            }
            made.tokens.extend(piece.tokens.iter().map(|(id, _)| id));
            made.log_probs
                .extend(piece.tokens.iter().map(|(_, log_prob)| log_prob * f32::from(piece.is_drawn)));
            let mask = u8::from(piece.is_drawn && piece.is_trained);
            made.loss_mask.resize(made.log_probs.len(), mask);
        }
        made
    }

    fn trajectory(&self, is_masked: bool) -> Trajectory<'_> {
        let sampled = Sampled {
            tokens: &self.tokens,
            prompt_len: self.prompt_len,
            log_probs: &self.log_probs,
            loss_mask: &self.loss_mask,
            is_masked,
            spans: self.spans.clone(),
            replies: self.replies.clone(),
        };
        let words = |ids: &[i32]| Ok(ids.iter().map(|id| format!("w{id}")).collect::<Vec<_>>().join(" "));
        let Ok(steps) = sampled.steps::<Infallible>(words);
        let model_name = Some("policy".to_owned());
        Trajectory {
            schema_version: VERSION.to_owned(),
            session_id: Some("run-answer-1".to_owned()),
            trajectory_id: Some("run-answer-1".to_owned()),
            agent: Agent { name: "driftless".to_owned(), version: "1".to_owned(), model_name },
            steps,
            extra: json!({ "driftless": { "reward": 0.5 } }),
            subagent_trajectories: None,
        }
    }
}

fn two_turns() -> Made {
    let piece = |is_drawn, version, tokens: &[(i32, f32)]| Piece {
        is_drawn,
        is_trained: true,
        version,
        tokens: tokens.to_vec(),
    };
    // The second turn went on at another engine.
    let pieces = [
        piece(true, 3, &[(7, -0.1), (8, -2.5)]),
        piece(false, 0, &[(5, 0.0), (6, 0.0)]),
        piece(true, 3, &[(9, -0.25)]),
        piece(true, 4, &[(7, 0.0), (2, -1e-7)]),
        piece(false, 0, &[(4, 0.0)]),
    ];
    Made::of(&[1, 2, 3], &pieces)
}

fn pieces() -> impl Strategy<Value = Vec<Piece>> {
    let token = (0..1000_i32, (0..40_u8).prop_map(|tenths| f32::from(tenths) / -10.0));
    let piece = (any::<bool>(), any::<bool>(), 0..4_u64, prop::collection::vec(token, 1..5));
    let piece = piece.prop_map(|(is_drawn, is_trained, version, tokens)| Piece {
        is_drawn,
        is_trained,
        version,
        tokens,
    });
    let drawn = |pieces: &Vec<Piece>| pieces.iter().any(|piece| piece.is_drawn);
    prop::collection::vec(piece, 1..7).prop_filter("something is drawn", drawn)
}

fn report(text: &str, tokenizer: Option<Tokenizer>) -> Report {
    let mut checker = Checker::new(tokenizer);
    checker.file("file.json", text.as_bytes()).unwrap();
    checker.into_report()
}

fn checked(trajectory: &Trajectory<'_>) -> Report {
    report(&serde_json::to_string(trajectory).unwrap(), None)
}

/// Words `w0` to `w9`.
fn tokenizer() -> Tokenizer {
    let words: serde_json::Map<_, _> = (0..10).map(|id| (format!("w{id}"), json!(id))).collect();
    let model = json!({ "type": "WordLevel", "vocab": words, "unk_token": "w0" });
    let text = json!({ "version": "1.0", "model": model }).to_string();
    Tokenizer::from_bytes("tokenizer.json", text.as_bytes()).unwrap()
}

/// The turns of a document.
fn turns<'t, 'a>(trajectory: &'t mut Trajectory<'a>) -> Vec<&'t mut Metrics<'a>> {
    trajectory.steps.iter_mut().filter_map(|step| step.metrics.as_mut()).collect()
}

/// Changes one thing of a document. Where it can be done in several places, `at` says in which.
fn change(trajectory: &mut Trajectory<'_>, what: usize, at: usize) -> Option<&'static str> {
    let count = trajectory.steps.len();
    if what == 0 {
        (count > 1).then(|| trajectory.steps.swap(at % (count - 1), count - 1))?;
        return Some("order of steps");
    }
    if what == 1 {
        trajectory.steps.remove(at % count);
        return Some("a step that is gone").filter(|_| at % count < count - 1);
    }
    let agents = trajectory.steps.iter_mut().filter(|step| step.source == Source::Agent);
    let mut agents: Vec<_> = agents.collect();
    let place = at % agents.len();
    let step = &mut agents[place];
    if what == 2 {
        let own = step.extra.as_mut()?.driftless.as_mut()?;
        own.weight_versions[0].0 += 1;
        return Some("version");
    }
    let metrics = step.metrics.as_mut()?;
    let [prompt, completion] =
        [&mut metrics.prompt_token_ids, &mut metrics.completion_token_ids].map(|ids| ids.as_mut());
    let (prompt, completion) = (prompt?.to_mut(), completion?.to_mut());
    let log_probs = metrics.logprobs.as_mut()?.to_mut();
    let drawn = at / 7 % completion.len();
    match what {
        3 => completion[drawn] += 1,
        4 => *prompt.get_mut(at / 7)? += 1,
        5 => log_probs[drawn] -= 0.01,
        6 => drop(log_probs.remove(drawn)),
        7 => drop(completion.remove(drawn)),
        8 => drop(prompt.pop()?),
        _ => prompt.push(1),
    }
    Some("tokens of a turn")
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_is_written_passes_and_has_all_tokens(
        prompt in prop::collection::vec(0..1000_i32, 0..4),
        pieces in pieces(),
        is_masked: bool,
    ) {
        let made = Made::of(&prompt, &pieces);
        let text = serde_json::to_string(&made.trajectory(is_masked)).unwrap();
        let report = report(&text, None);
        prop_assert_eq!(report.faults, 0, "{:?}", report.first);
        prop_assert_eq!(report.replies as usize, made.replies.len());
        prop_assert_eq!(report.tokens, made.replies.iter().map(|reply| u64::from(reply.end - reply.start)).sum::<u64>());
        prop_assert_eq!(report.continued + 1, report.turns);
        // The document alone has the sample.
        let read: Trajectory<'_> = serde_json::from_str(&text).unwrap();
        let mut told = Vec::new();
        let response = |tokens: &Vec<i32>| tokens.len() - prompt.len();
        let (mut spans, mut masked) = (Vec::new(), vec![0; made.loss_mask.len()]);
        for step in &read.steps {
            let own = step.extra.as_ref().and_then(|extra| extra.driftless.clone()).unwrap_or_default();
            if let Some(rest) = own.token_ids {
                told.extend_from_slice(&rest);
            }
            let Some(metrics) = &step.metrics else { continue };
            told = metrics.prompt_token_ids.clone().unwrap().into_owned();
            let start = response(&told);
            told.extend_from_slice(metrics.completion_token_ids.as_ref().unwrap());
            let end = response(&told);
            prop_assert_eq!(metrics.logprobs.as_deref().unwrap(), &made.log_probs[start..end]);
            masked[start..end].copy_from_slice(&own.loss_mask.unwrap());
            let shift = start as u32;
            spans.extend(own.weight_versions.iter().map(|(version, from, to)| (*version, from + shift, to + shift)));
        }
        prop_assert_eq!(&told, &made.tokens);
        prop_assert_eq!(spans, made.spans);
        prop_assert_eq!(masked, if is_masked { vec![0; made.loss_mask.len()] } else { made.loss_mask });
    }

    #[test]
    fn any_single_change_is_found(
        prompt in prop::collection::vec(0..1000_i32, 1..4),
        pieces in pieces(),
        what in 0..10_usize,
        at in 0..1000_usize,
    ) {
        let made = Made::of(&prompt, &pieces);
        let mut trajectory = made.trajectory(false);
        let Some(changed) = change(&mut trajectory, what, at) else { return Ok(()) };
        prop_assert!(checked(&trajectory).faults > 0, "{}: {:?}", changed, trajectory);
    }

    #[test]
    fn no_bytes_make_it_panic(
        cut in 0..GOLDEN.len(),
        at in 0..GOLDEN.len(),
        byte: u8,
        noise in prop::collection::vec(any::<u8>(), 0..64),
    ) {
        let mut flipped = GOLDEN.as_bytes().to_vec();
        flipped[at] = byte;
        for bytes in [&GOLDEN.as_bytes()[..cut], &flipped, &noise] {
            let mut checker = Checker::new(Some(tokenizer()));
            checker.file("file.json", bytes).unwrap();
        }
    }
}

#[test]
fn golden_file_is_what_is_written() {
    let made = two_turns();
    let written = serde_json::to_string_pretty(&made.trajectory(false)).unwrap();
    assert_eq!(written.trim(), GOLDEN.trim(), "{written}");
    let report = report(GOLDEN, Some(tokenizer()));
    assert_eq!(
        (report.faults, report.turns, report.texts, report.replies),
        (0, 2, 4, 3),
        "{:?}",
        report.first
    );
}

#[test]
fn text_that_the_ids_do_not_say_is_named() {
    let made = two_turns();
    for (step, said) in [(0, "w1 w2 w9"), (1, "w7"), (1, "w7 w9"), (2, "w9")] {
        let mut trajectory = made.trajectory(false);
        trajectory.steps[step].message = Message::Text(said.to_owned());
        let text = serde_json::to_string(&trajectory).unwrap();
        // A part of what the ids say may be what a parser left of it.
        let expected = u64::from(said != "w7");
        let report = report(&text, Some(tokenizer()));
        assert_eq!(report.faults, expected, "{said}: {:?}", report.first);
        assert!(report.first.iter().all(|fault| fault.expected.contains(said)), "{:?}", report.first);
    }
}

#[test]
fn faults_name_the_file_the_step_and_both_sides() {
    let made = two_turns();
    let mut trajectory = made.trajectory(false);
    let mut changed = turns(&mut trajectory);
    changed[1].prompt_token_ids.as_mut().unwrap().to_mut()[4] = 99;
    trajectory.steps.iter_mut().for_each(|step| step.extra = None);
    let report = checked(&trajectory);
    let told: Vec<_> = report.first.iter().map(ToString::to_string).collect();
    let expected = "file.json, trajectory 1, step 4: prompt_token_ids: expected the 5 ids that step 2 read and drew, with id 8 \
                    at 4, found id 99";
    assert_eq!((told.as_slice(), report.continued), (&[expected.to_owned()][..], 0));
}

#[test]
fn anybodys_file_is_checked_as_far_as_it_says() {
    let whole = report(FOREIGN, None);
    assert_eq!((whole.faults, whole.trajectories, whole.steps), (0, 2, 7), "{:?}", whole.first);
    assert_eq!((whole.turns, whole.tokens, whole.log_probs, whole.continued), (2, 5, 3, 1));
    let unchecked = &whole.unchecked;
    assert_eq!((unchecked.without_ids, unchecked.without_log_probs, unchecked.without_digest), (1, 1, 2));
    let lines = format!("{FOREIGN}\n{FOREIGN}");
    assert_eq!(report(&lines, None).trajectories, 4, "several of a file");
    for (from, to, what) in [
        ("ATIF-v1.6", "ATIF-v2.0", "schema_version"),
        ("\"step_id\": 3", "\"step_id\": 4", "step_id"),
        ("[11, 12, 13]", "[11, 12]", "completion_token_ids"),
        ("[-0.5, -0.25, -1e-9]", "[-0.5, -0.25]", "logprobs"),
        ("-0.25", "0.25", "logprobs"),
        ("-0.25", "-1e300", "logprobs"),
        ("[1, 2, 3, 11, 12, 13, 4]", "[1, 2, 3, 11, 13, 13, 4]", "prompt_token_ids"),
        ("[1, 2, 3, 11, 12, 13, 4]", "[1, 2, 3, 11, 12]", "prompt_token_ids"),
        ("\"prompt_tokens\": 3", "\"prompt_tokens\": 4", "prompt_token_ids"),
        ("\"source\": \"agent\"", "\"source\": \"user\"", "metrics"),
    ] {
        let changed = FOREIGN.replacen(from, to, 1);
        assert_ne!(changed, FOREIGN, "{from}");
        let report = report(&changed, None);
        assert!(report.first.iter().any(|fault| fault.what == what), "{from} as {to}: {:?}", report.first);
    }
}

#[test]
fn hostile_files_are_faults_and_end() {
    let deep = "[".repeat(100_000);
    let nested = format!("{{\"schema_version\":{deep}");
    let unknown = format!("{{\"unknown\":{deep}");
    let many = format!("[{}]", "1,".repeat(1000) + "1");
    let wrong = [
        GOLDEN.replacen("[\n", "{\n", 1),
        GOLDEN.replacen("\"w1 w2 w3\"", "7", 1),
        GOLDEN.replacen("\"step_id\": 1", "\"step_id\": -1", 1),
        GOLDEN.replacen("\"source\": \"agent\"", "\"source\": \"nobody\"", 1),
        GOLDEN.replacen("-0.25", "-1e999", 1),
        GOLDEN.replacen("-0.25", "NaN", 1),
        GOLDEN.replacen("-0.25", "null", 1),
        GOLDEN.replacen("          1,", "99999999999,", 1),
    ];
    let others = [
        "",
        " \n",
        "null",
        "7",
        "\u{1b}[2J",
        "{\"schema_version\": \"ATIF-v1.7\"",
        &deep,
        &nested,
        &unknown,
        &many,
    ];
    for text in others.into_iter().chain(wrong.iter().map(String::as_str)) {
        let report = report(text, None);
        let start: String = text.chars().take(80).collect();
        assert_eq!(report.faults, 1, "{start}: {:?}", report.first);
        assert_eq!(
            (&report.first[0].what[..], &report.first[0].expected[..]),
            ("JSON", "an ATIF trajectory"),
            "{start}"
        );
    }
    // Claims of our own that no reply of an engine has.
    let made = two_turns();
    for (start, end, fault) in [(0, 9, true), (2, 1, true), (u32::MAX, 0, true), (0, 2, false)] {
        let mut trajectory = made.trajectory(false);
        let reply = ReplyDigest { start, end, ..made.replies[0] };
        let own = trajectory.steps[1].extra.as_mut().unwrap().driftless.as_mut().unwrap();
        own.replies = vec![hex::encode(reply.to_bytes())];
        own.weight_versions = vec![(3, 0, 2)];
        assert_eq!(checked(&trajectory).faults > 0, fault, "{start} to {end}");
        let own = trajectory.steps[1].extra.as_mut().unwrap().driftless.as_mut().unwrap();
        own.replies = vec!["zz".to_owned()];
        own.loss_mask = Some(Cow::Owned(vec![1; 7]));
        own.weight_versions = vec![(3, start, end)];
        assert!(checked(&trajectory).faults >= 2);
    }
}

#[test]
fn turns_are_where_the_log_says_that_something_was_drawn() {
    let made = two_turns();
    let starts = |made: &Made| {
        let trajectory = made.trajectory(false);
        let sources = trajectory.steps.iter().map(|step| step.source == Source::Agent);
        sources.collect::<Vec<_>>()
    };
    let both = vec![false, true, false, true, false];
    assert_eq!(starts(&made), both);
    let by_mask = Made { replies: vec![], spans: vec![(3, 0, 8)], ..made.clone() };
    assert_eq!(starts(&by_mask), both, "a version of the whole response is no turn");
    let untrained = Made { loss_mask: vec![0; made.loss_mask.len()], ..made.clone() };
    assert_eq!(starts(&untrained), both, "what is not trained on was drawn as well");
    let by_versions = Made { replies: vec![], ..untrained };
    assert_eq!(starts(&by_versions), both);
    assert_eq!(starts(&Made { spans: vec![], ..by_versions }), [false, true]);
    let nothing = Made::of(&[1, 2], &[]);
    assert_eq!(starts(&nothing), [false, true]);
    let beyond = Made { prompt_len: 9, ..nothing };
    assert_eq!(starts(&beyond), [false, true]);
}

#[test]
fn log_probs_that_json_has_no_number_for_are_left_out() {
    let mut made = two_turns();
    made.log_probs[0] = f32::NEG_INFINITY;
    let trajectory = made.trajectory(false);
    let report = checked(&trajectory);
    assert_eq!((report.faults, report.unchecked.without_log_probs), (0, 1), "{:?}", report.first);
}
