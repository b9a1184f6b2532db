//! A command's claim becomes a sample that can be trained on: every trained token has the id, the log-probability and
//! the version that an engine gave it.

use std::collections::{BTreeMap, HashSet};

use driftless_bridge::Generation;
use driftless_bridge::engine::context;
use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

use super::Fault;
use crate::error::short;
use crate::sample::{Read, Trajectory, finite};

/// A sample as a command describes it.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Claim {
    /// Prompt and response.
    pub(super) tokens: Option<Vec<i32>>,
    /// Tokens of the prompt; those that the sample was asked for with, if absent.
    pub(super) prompt_len: Option<usize>,
    /// Per response token, whether to train on it; 1 for what an engine generated, if absent.
    pub(super) loss_mask: Option<Vec<u8>>,
    /// What rewards are given in place of the prompt's.
    pub(super) metadata: Option<Box<RawValue>>,
    /// The reward of the answer, in place of the one that is asked for.
    pub(super) reward: Option<Value>,
    /// What it is made of, by name.
    #[serde(default)]
    pub(super) rewards: BTreeMap<String, Value>,
}

/// A generation, and what the engine read.
#[derive(Debug, Clone)]
pub(super) struct Made {
    pub(super) read: Read,
    pub(super) generation: Generation,
}

/// Puts a sample together and checks it against the generations that were made for it. `prompt` is what the
/// sample was asked for with; ids are below `vocabulary`.
pub(super) fn assemble(
    claim: Claim,
    prompt: &[i32],
    made: &[Made],
    vocabulary: Option<u64>,
) -> Result<Trajectory, Fault> {
    let given = claim.tokens.as_deref();
    let tokens =
        given.ok_or_else(|| Fault::of("`tokens`, or a generation before the sample", "neither"))?.to_vec();
    let prompt_len = match claim.prompt_len {
        Some(given) if (1..=tokens.len()).contains(&given) => given,
        Some(given) => return Err(Fault::of(format_args!("`prompt_len` in 1..={}", tokens.len()), given)),
        None if tokens.starts_with(prompt) => prompt.len(),
        None => {
            let expected = "`tokens` that begin with `input_ids` of the question, or a `prompt_len`";
            return Err(Fault::of(expected, "others"));
        }
    };
    let bound = vocabulary.unwrap_or(i32::MAX as u64);
    if let Some(id) = tokens.iter().find(|id| u64::try_from(**id).map_or(true, |id| id >= bound)) {
        return Err(Fault::of(format_args!("`tokens` in 0..{bound}"), id));
    }
    let mut trajectory = Trajectory::new(tokens, prompt_len);
    for one in made {
        // Of several that had read the same, the sample goes on with the one of which it has most.
        let matched = |made: &Made| trajectory.matched(&made.read, &made.generation.output_ids);
        let mut twins = made.iter().filter(|twin| twin.read == one.read);
        if twins.all(|twin| std::ptr::eq(twin, one) || matched(twin) <= matched(one)) {
            trajectory.take(&one.read, &one.generation);
        }
    }
    tell(&mut trajectory, &claim)?;
    match claim.loss_mask {
        Some(mask) => trajectory.masked(mask),
        None => Ok(trajectory),
    }
}

/// What a claim says of its answer, beside a sample of it. What it does not say stays as it was.
pub(super) fn tell(sample: &mut Trajectory, claim: &Claim) -> Result<(), Fault> {
    if claim.metadata.is_some() {
        sample.metadata.clone_from(&claim.metadata);
    }
    if let Some(reward) = &claim.reward {
        sample.reward = Some(number("reward", reward)?);
    }
    if !claim.rewards.is_empty() {
        sample.components = numbers(&claim.rewards)?;
    }
    Ok(())
}

/// What a reward is made of, by name.
pub(super) fn numbers(named: &BTreeMap<String, Value>) -> Result<BTreeMap<String, f32>, Fault> {
    named.iter().map(|(name, value)| Ok((name.clone(), number(name, value)?))).collect()
}

/// A reward that a hook gives, or a part of it.
fn number(name: &str, value: &Value) -> Result<f32, Fault> {
    let found = || format!("`{}`", short(&value.to_string()));
    finite(value).ok_or_else(|| Fault::of(format_args!("one finite number as `{name}`"), found()))
}

/// Has each token that several samples of an answer hold trained on in the first of them alone.
pub(super) fn once(samples: &mut [Trajectory]) {
    let mut trained = HashSet::new();
    for Trajectory { tokens, prompt_len, loss_mask, replies, .. } in samples {
        for reply in replies {
            let mut behind = reply.context;
            for at in reply.start as usize..reply.end as usize {
                let is_new = loss_mask[at] == 0 || trained.insert((reply.rid, behind));
                loss_mask[at] &= u8::from(is_new);
                behind = context(behind, &[tokens[*prompt_len + at]]);
            }
        }
    }
}

impl Trajectory {
    /// Trains on a part of what the engines wrote.
    fn masked(mut self, mask: Vec<u8>) -> Result<Self, Fault> {
        if mask.len() != self.loss_mask.len() || mask.iter().any(|keep| *keep > 1) {
            let expected = format!("`loss_mask` of 0 and 1 for {} response tokens", self.loss_mask.len());
            let found = format!("{} numbers up to {:?}", mask.len(), mask.iter().max());
            return Err(Fault::of(expected, found));
        }
        let foreign = mask.iter().zip(&self.loss_mask).position(|(wanted, made)| wanted > made);
        if let Some(at) = foreign {
            let expected =
                "a `loss_mask` that trains on what a generation of this sample wrote behind these tokens";
            return Err(Fault::of(expected, format_args!("1 for response token {at}, which none did")));
        }
        self.loss_mask = mask;
        Ok(self)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;
    use driftless_bridge::engine::{Finish, VersionSpan as Spoken};
    use driftless_bridge::{Label, Rid};
    use driftless_buffer::{self as buffer, VersionSpan};

    fn made(input_ids: &[i32], output_ids: &[i32], version: u64) -> Made {
        let label = Label::new("0123456789ab", version).unwrap().to_string();
        let end = output_ids.len() as u32;
        Made {
            read: Read::of(input_ids),
            generation: Generation {
                rid: Rid::new(1, 2),
                engine: format!("engine-{version}"),
                output_ids: output_ids.to_vec(),
                log_probs: output_ids.iter().map(|id| -(*id as f32)).collect(),
                spans: vec![Spoken { label, start: 0, end }],
                spans_reported: true,
                finish: Finish::Length,
                retractions: 0,
                cached_tokens: None,
                replies: Vec::new(),
            }
            .digested(input_ids),
        }
    }

    fn claim(tokens: &[i32]) -> Claim {
        Claim { tokens: Some(tokens.to_vec()), ..Claim::default() }
    }

    fn span(version: u64, start: u32, end: u32) -> VersionSpan {
        VersionSpan { version, start, end }
    }

    #[test]
    fn two_turns_have_log_probs_where_engines_wrote() {
        // The engine wrote 3 4, a tool 5 6, the engine 7.
        let turns = [made(&[1, 2], &[3, 4], 8), made(&[1, 2, 3, 4, 5, 6], &[7], 9)];
        let sample = assemble(claim(&[1, 2, 3, 4, 5, 6, 7]), &[1, 2], &turns, Some(8)).unwrap();
        assert_eq!(sample.log_probs, [-3.0, -4.0, 0.0, 0.0, -7.0]);
        assert_eq!(sample.loss_mask, [1, 1, 0, 0, 1]);
        assert_eq!(sample.spans, [span(8, 0, 2), span(9, 4, 5)]);
        assert_eq!((sample.engine.as_str(), sample.finish), ("engine-9", buffer::Finish::Length));
    }

    #[test]
    fn part_of_a_generation_is_kept_with_its_version() {
        let sample = assemble(claim(&[1, 2, 3, 9]), &[1, 2], &[made(&[1, 2], &[3, 4], 8)], None).unwrap();
        assert_eq!((sample.loss_mask, sample.log_probs), (vec![1, 0], vec![-3.0, 0.0]));
        assert_eq!((sample.spans, sample.finish), (vec![span(8, 0, 1)], buffer::Finish::Stop));
    }

    #[test]
    fn token_behind_others_than_the_engine_read_is_not_trained_on() {
        let turns = [made(&[1, 2], &[3, 4], 8)];
        let sample = assemble(claim(&[1, 5, 3, 4]), &[1, 5], &turns, None).unwrap();
        assert_eq!(sample.loss_mask, [0, 0]);
        let mask = Claim { loss_mask: Some(vec![1, 0]), ..claim(&[1, 5, 3, 4]) };
        let fault = assemble(mask, &[1, 5], &turns, None).unwrap_err();
        assert!(fault.found.contains("response token 0"), "{fault:?}");
    }

    #[test]
    fn best_of_several_generations_is_taken_with_its_own_log_probs() {
        let turns = [made(&[1], &[2, 3], 8), made(&[1], &[4, 5], 9)];
        let sample = assemble(claim(&[1, 2, 3]), &[1], &turns, None).unwrap();
        assert_eq!((sample.log_probs, sample.spans), (vec![-2.0, -3.0], vec![span(8, 0, 2)]));
        // Both begin alike.
        let turns = [made(&[1], &[2, 3], 8), made(&[1], &[2, 5], 9)];
        let sample = assemble(claim(&[1, 2, 5]), &[1], &turns, None).unwrap();
        assert_eq!((sample.log_probs, sample.spans), (vec![-2.0, -5.0], vec![span(9, 0, 2)]));
    }

    #[test]
    fn token_of_several_samples_is_trained_on_in_the_first() {
        let turns = [made(&[1], &[2, 3], 8), made(&[1, 2, 3, 4], &[5], 9)];
        let of = |tokens: &[i32]| assemble(claim(tokens), &[1], &turns, None).unwrap();
        let masked = Claim { loss_mask: Some(vec![0, 1]), ..claim(&[1, 2, 3]) };
        let mut samples = [
            assemble(masked, &[1], &turns, None).unwrap(),
            of(&[1, 2, 3, 4, 5]),
            of(&[1, 2, 3]),
            // Another token before them: no engine wrote these here.
            of(&[1, 7, 3, 4, 5]),
        ];
        once(&mut samples);
        let masks = samples.map(|sample| sample.loss_mask);
        assert_eq!(masks, [vec![0, 1], vec![1, 0, 0, 1], vec![0, 0], vec![0; 4]]);
    }

    #[test]
    fn generation_without_room_ends_the_sample_with_length() {
        let turns = [made(&[1, 2], &[3], 8), made(&[1, 2, 3, 4], &[], 9)];
        let sample = assemble(claim(&[1, 2, 3, 4]), &[1, 2], &turns, None).unwrap();
        assert_eq!((sample.tokens, sample.finish), (vec![1, 2, 3, 4], buffer::Finish::Length));
        assert_eq!((sample.loss_mask, sample.spans), (vec![1, 0], vec![span(8, 0, 1)]));
    }

    #[test]
    fn claim_that_is_no_sample_is_refused_with_the_rule() {
        let turns = [made(&[1, 2], &[3, 4], 8)];
        let refused = |claim: Claim, vocabulary| assemble(claim, &[1, 2], &turns, vocabulary).unwrap_err();
        assert!(refused(claim(&[9, 3]), None).expected.contains("prompt_len"));
        let long = Claim { prompt_len: Some(4), ..claim(&[1, 2, 3]) };
        assert!(refused(long, None).expected.contains("1..=3"));
        assert!(refused(claim(&[1, 2, -3]), None).found.contains("-3"));
        assert!(refused(claim(&[1, 2, 3, 7]), Some(7)).found.contains('7'));
        for mask in [vec![1], vec![2, 0], vec![1, 1, 1]] {
            let masked = Claim { loss_mask: Some(mask), ..claim(&[1, 2, 3, 4]) };
            assert!(refused(masked, None).expected.contains("2 response tokens"));
        }
        assert!(assemble(Claim::default(), &[1, 2], &[], None).is_err());
    }

    /// Whatever a command makes of its generations, a token that is trained on is one that an engine gave
    /// this id and log-probability, behind exactly the tokens before it.
    #[test]
    fn every_trained_token_is_an_engines() {
        let mut state = 7_u64;
        let mut draw = |below: u64| {
            state = crate::seed::mix(state);
            state % below
        };
        for round in 0..2000 {
            let mut tokens: Vec<i32> = (0..1 + draw(2)).map(|_| draw(3) as i32).collect();
            let prompt = tokens.clone();
            let (mut turns, mut all) = (Vec::new(), Vec::new());
            for version in 0..1 + draw(3) {
                let output: Vec<i32> = (0..1 + draw(3)).map(|_| draw(3) as i32).collect();
                turns.push(made(&tokens, &output, version));
                all.push([tokens.as_slice(), &output].concat());
                match draw(3) {
                    // Another generation of the same, or a token of the engine's that is changed.
                    0 => {}
                    1 => tokens.extend(output.iter().map(|id| (id + draw(2) as i32) % 3)),
                    _ => tokens.extend(output),
                }
                tokens.extend((0..draw(2)).map(|_| draw(3) as i32));
            }
            let sample = assemble(claim(&tokens), &prompt, &turns, Some(3)).unwrap();
            for (at, _) in sample.loss_mask.iter().enumerate().filter(|(_, keep)| **keep == 1) {
                let place = sample.prompt_len + at;
                let version = sample.spans.iter().find(|span| (span.start..span.end).contains(&(at as u32)));
                let version =
                    version.unwrap_or_else(|| panic!("round {round}: token {at} has no version")).version;
                let written = &all[version as usize];
                assert_eq!(tokens[..=place], written[..=place], "round {round}");
                assert_eq!(sample.log_probs[at], -(tokens[place] as f32), "round {round}");
            }
        }
    }
}
