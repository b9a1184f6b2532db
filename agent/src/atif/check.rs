//! Checks of trajectories, whoever wrote them: as far as a document says enough.

use std::fmt;

use driftless_bridge::engine::{Digester, ReplyDigest, context};
use serde::Serialize;

use super::{Message, Metrics, Own, Source, Step, Trajectory};
use crate::error::{Result, short};
use crate::tokenizer::Tokenizer;

/// Faults that a report names. It counts all.
const NAMED_MAX: usize = 20;
/// The last known one of the versions, which are `ATIF-v1.0` and on.
const MINOR_MAX: u32 = 8;

/// What was checked, and what was found.
#[derive(Debug, Default, Serialize)]
#[non_exhaustive]
pub struct Report {
    /// Files.
    pub files: u64,
    /// Documents, those of subagents included.
    pub trajectories: u64,
    /// Their steps.
    pub steps: u64,
    /// Steps of an agent that have token ids.
    pub turns: u64,
    /// Ids that were drawn.
    pub tokens: u64,
    /// Their log-probabilities.
    pub log_probs: u64,
    /// Prompts that begin with all that the turn before read and drew.
    pub continued: u64,
    /// Texts that the ids say.
    pub texts: u64,
    /// Replies of engines whose digests were compared.
    pub replies: u64,
    /// What could not be checked.
    pub unchecked: Unchecked,
    /// How many faults there are.
    pub faults: u64,
    /// The first of them.
    pub first: Vec<Fault>,
}

/// Steps of an agent that could not be checked, and why.
#[derive(Debug, Default, Serialize)]
#[non_exhaustive]
pub struct Unchecked {
    /// Without ids of what was drawn.
    pub without_ids: u64,
    /// With ids, and without log-probabilities.
    pub without_log_probs: u64,
    /// With ids, and without those of the prompt.
    pub without_prompt: u64,
    /// Of several requests to the model, whose tokens are told together.
    pub aggregated: u64,
    /// With ids, and without a digest of the engine's reply.
    pub without_digest: u64,
}

/// Something that is not as it has to be.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Fault {
    /// The file.
    pub file: String,
    /// Number of the document in the file, from 1; behind a point that of a subagent in it.
    pub trajectory: String,
    /// Number of the step, from 1.
    pub step: Option<u64>,
    /// What is wrong.
    pub what: String,
    /// What it has to be.
    pub expected: String,
    /// What it is.
    pub found: String,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, trajectory {}", self.file, self.trajectory)?;
        if let Some(step) = self.step {
            write!(f, ", step {step}")?;
        }
        write!(f, ": {}: expected {}, found {}", self.what, self.expected, self.found)
    }
}

/// Checks files one after another.
#[derive(Debug, Default)]
pub struct Checker {
    tokenizer: Option<Tokenizer>,
    report: Report,
    /// Where it is, but for the fault.
    at: Fault,
}

/// What the agent read and drew before.
struct Before<'a> {
    step: u64,
    prompt: &'a [i32],
    completion: &'a [i32],
}

impl Checker {
    /// Compares ids with texts where it has a tokenizer.
    #[must_use]
    pub fn new(tokenizer: Option<Tokenizer>) -> Self {
        Checker { tokenizer, ..Checker::default() }
    }

    /// What was found so far.
    #[must_use]
    pub fn into_report(self) -> Report {
        self.report
    }

    /// Checks a file: one document, or several one after another. What is wrong with it is in the report.
    ///
    /// # Errors
    /// [`crate::Error::Tokenizer`] if the tokenizer fails.
    pub fn file(&mut self, name: &str, bytes: &[u8]) -> Result<()> {
        self.report.files += 1;
        self.at = Fault { file: name.to_owned(), ..Fault::default() };
        let mut number = 0;
        for trajectory in serde_json::Deserializer::from_slice(bytes).into_iter() {
            number += 1;
            match trajectory {
                Ok(trajectory) => self.trajectory(&trajectory, number.to_string())?,
                // Where the next document begins cannot be told behind it.
                Err(error) => {
                    (self.at.trajectory, self.at.step) = (number.to_string(), None);
                    self.found("JSON", "an ATIF trajectory", short(&error.to_string()));
                    return Ok(());
                }
            }
        }
        if number == 0 {
            self.at.trajectory = "1".to_owned();
            self.found("JSON", "an ATIF trajectory", "an empty file");
        }
        Ok(())
    }

    fn trajectory(&mut self, trajectory: &Trajectory<'_>, place: String) -> Result<()> {
        self.report.trajectories += 1;
        (self.at.trajectory, self.at.step) = (place.clone(), None);
        let version = &trajectory.schema_version;
        if !(0..=MINOR_MAX).any(|minor| *version == format!("ATIF-v1.{minor}")) {
            let expected = format!("ATIF-v1.0 to ATIF-v1.{MINOR_MAX}");
            self.found("schema_version", expected, short(version));
        }
        if trajectory.steps.is_empty() {
            self.found("steps", "at least one", "none");
        }
        let (mut before, mut asked) = (None, None);
        for (number, step) in (1..).zip(&trajectory.steps) {
            self.report.steps += 1;
            self.at.step = Some(number);
            if step.step_id != number {
                self.found("step_id", number.to_string(), step.step_id.to_string());
            }
            match (step.source, &step.metrics) {
                (Source::Agent, Some(metrics)) => {
                    self.turn(step, metrics, before.as_ref(), asked.take())?;
                    before = read_and_drawn(number, step, metrics);
                }
                (Source::Agent, None) => {
                    self.report.unchecked.without_ids += u64::from(step.llm_call_count != Some(0));
                    (before, asked) = (None, None);
                }
                (_, Some(_)) => self.found("metrics", "none, as no agent took the step", "some"),
                (Source::User, None) => asked = text(&step.message).map(|text| (number, text)),
                (Source::System, None) => {}
            }
        }
        for (number, subagent) in (1..).zip(trajectory.subagent_trajectories.iter().flatten()) {
            self.trajectory(subagent, format!("{place}.{number}"))?;
        }
        Ok(())
    }

    /// Checks a step of an agent, and whether it read what it was asked last.
    fn turn(
        &mut self,
        step: &Step<'_>,
        metrics: &Metrics<'_>,
        before: Option<&Before<'_>>,
        asked: Option<(u64, &str)>,
    ) -> Result<()> {
        if step.llm_call_count.is_some_and(|requests| requests > 1) {
            self.report.unchecked.aggregated += 1;
            return Ok(());
        }
        let Metrics { prompt_token_ids: prompt, completion_token_ids: completion, logprobs, .. } = metrics;
        let (prompt, completion, log_probs) = (prompt.as_deref(), completion.as_deref(), logprobs.as_deref());
        self.length("prompt_token_ids", prompt.map(<[_]>::len), "prompt_tokens", metrics.prompt_tokens);
        let drawn = metrics.completion_tokens;
        self.length("completion_token_ids", completion.map(<[_]>::len), "completion_tokens", drawn);
        let ids = completion.map(|ids| ids.len() as u64);
        self.length("logprobs", log_probs.map(<[_]>::len), "completion_token_ids", ids.or(drawn));
        self.ids("prompt_token_ids", prompt.unwrap_or_default());
        self.log_probs(log_probs.unwrap_or_default());
        if let (Some(prompt), Some(before)) = (prompt, before) {
            self.continues(prompt, before);
        }
        if let Some((number, text)) = asked {
            self.says(&format!("text of step {number} in prompt_token_ids"), text, prompt)?;
        }
        let Some(completion) = completion else {
            self.report.unchecked.without_ids += 1;
            return Ok(());
        };
        self.ids("completion_token_ids", completion);
        self.report.turns += 1;
        self.report.tokens += completion.len() as u64;
        self.report.unchecked.without_log_probs += u64::from(log_probs.is_none());
        self.report.unchecked.without_prompt += u64::from(prompt.is_none());
        self.says(
            "message in completion_token_ids",
            text(&step.message).unwrap_or_default(),
            Some(completion),
        )?;
        let thoughts = step.reasoning_content.as_deref().unwrap_or_default();
        self.says("reasoning_content in completion_token_ids", thoughts, Some(completion))?;
        match step.extra.as_ref().and_then(|extra| extra.driftless.as_ref()) {
            Some(own) => self.own(own, prompt.unwrap_or_default(), completion, log_probs),
            None => self.report.unchecked.without_digest += 1,
        }
        Ok(())
    }

    /// As many of one as another field says.
    fn length(&mut self, what: &str, found: Option<usize>, other: &str, expected: Option<u64>) {
        if let (Some(found), Some(expected)) = (found.map(|found| found as u64), expected)
            && found != expected
        {
            self.found(what, format!("{expected}, as {other} says"), found.to_string());
        }
    }

    fn ids(&mut self, what: &str, ids: &[i32]) {
        if let Some(at) = ids.iter().position(|id| *id < 0) {
            self.found(what, "ids from 0 on", format!("{} at {at}", ids[at]));
        }
    }

    fn log_probs(&mut self, log_probs: &[f32]) {
        self.report.log_probs += log_probs.len() as u64;
        let is_one = |log_prob: &f32| log_prob.is_finite() && *log_prob <= 0.0;
        if let Some(at) = log_probs.iter().position(|log_prob| !is_one(log_prob)) {
            self.found("logprobs", "finite numbers of at most 0", format!("{} at {at}", log_probs[at]));
        }
    }

    /// Whether a prompt begins with all that the turn before read and drew.
    fn continues(&mut self, prompt: &[i32], before: &Before<'_>) {
        let known = before.prompt.len() + before.completion.len();
        let mut expected = before.prompt.iter().chain(before.completion).enumerate();
        let differs = expected.find(|(at, id)| prompt.get(*at) != Some(*id));
        let Some((at, id)) = differs else {
            self.report.continued += 1;
            return;
        };
        let found = prompt.get(at).map_or_else(|| "the end".to_owned(), |id| format!("id {id}"));
        let expected =
            format!("the {known} ids that step {} read and drew, with id {id} at {at}", before.step);
        self.found("prompt_token_ids", expected, found);
    }

    /// Whether ids say a text. Spaces around it do not count: templates put others there.
    fn says(&mut self, what: &str, text: &str, ids: Option<&[i32]>) -> Result<()> {
        let (Some(tokenizer), Some(ids)) = (&self.tokenizer, ids) else { return Ok(()) };
        let said = tokenizer.decode(ids)?;
        if text.trim().is_empty() {
            return Ok(());
        }
        if said.contains(text.trim()) || tokenizer.decode_all(ids)?.contains(text.trim()) {
            self.report.texts += 1;
        } else {
            self.found(what, format!("`{}`", short(text.trim())), format!("`{}`", short(said.trim())));
        }
        Ok(())
    }

    /// Checks what this project says of a turn.
    fn own(&mut self, own: &Own<'_>, prompt: &[i32], completion: &[i32], log_probs: Option<&[f32]>) {
        let drawn = completion.len();
        let mask = own.loss_mask.as_ref().map(|mask| mask.len());
        self.length("loss_mask", mask, "completion_token_ids", Some(drawn as u64));
        let Some(versions) = versions_of(&own.weight_versions, drawn) else {
            let expected = format!("ascending tokens below {drawn}");
            let found = short(&format!("{:?}", &own.weight_versions[..own.weight_versions.len().min(9)]));
            return self.found("weight_versions", expected, found);
        };
        let log_probs = log_probs.filter(|log_probs| log_probs.len() == drawn && !own.replies.is_empty());
        let Some(log_probs) = log_probs else {
            self.report.unchecked.without_digest += 1;
            return;
        };
        let (mut next, mut behind) = (0, context(0, prompt));
        for entry in &own.replies {
            let reply =
                reply_of(entry).filter(|reply| next <= reply.start as usize && reply.start < reply.end);
            let Some(reply) = reply.filter(|reply| reply.end as usize <= drawn) else {
                let expected =
                    format!("{} bytes in hex, of tokens from {next} to {drawn}", ReplyDigest::BYTES);
                return self.found("replies", expected, format!("`{}`", short(entry)));
            };
            let (start, end) = (reply.start as usize, reply.end as usize);
            behind = context(behind, &completion[next..start]);
            if behind != reply.context {
                let (expected, found) = (format!("{:016x}", reply.context), format!("{behind:016x}"));
                self.found("digest of the ids before a reply", expected, found);
            }
            let mut digester = Digester::new(reply.rid, reply.context);
            (start..end).for_each(|at| digester.push(completion[at], log_probs[at], versions[at]));
            if digester.digest() != reply.digest {
                let (expected, found) =
                    (format!("{:032x}", reply.digest), format!("{:032x}", digester.digest()));
                self.found("digest of a reply's ids, log-probabilities and versions", expected, found);
            }
            behind = context(behind, &completion[start..end]);
            next = end;
            self.report.replies += 1;
        }
    }

    fn found(&mut self, what: &str, expected: impl Into<String>, found: impl Into<String>) {
        self.report.faults += 1;
        if self.report.first.len() < NAMED_MAX {
            let (what, expected, found) = (what.to_owned(), expected.into(), found.into());
            self.report.first.push(Fault { what, expected, found, ..self.at.clone() });
        }
    }
}

/// What the next turn has to go on behind, if that is known.
fn read_and_drawn<'a>(number: u64, step: &Step<'_>, metrics: &'a Metrics<'_>) -> Option<Before<'a>> {
    let whole =
        step.llm_call_count.is_none_or(|requests| requests <= 1) && step.is_copied_context != Some(true);
    let prompt = metrics.prompt_token_ids.as_deref().filter(|_| whole)?;
    let completion = metrics.completion_token_ids.as_deref().unwrap_or_default();
    Some(Before { step: number, prompt, completion })
}

fn text(message: &Message) -> Option<&str> {
    match message {
        Message::Text(text) => Some(text),
        Message::Parts(_) => None,
    }
}

/// The version of each token; none if the spans do not ascend, or end behind the tokens.
fn versions_of(spans: &[(u64, u32, u32)], tokens: usize) -> Option<Vec<Option<u64>>> {
    let (mut versions, mut next) = (vec![None; tokens], 0);
    for (version, start, end) in spans {
        let places = *start as usize..*end as usize;
        (next <= places.start && !places.is_empty()).then_some(())?;
        next = places.end;
        versions.get_mut(places)?.fill(Some(*version));
    }
    Some(versions)
}

fn reply_of(entry: &str) -> Option<ReplyDigest> {
    let mut bytes = [0; ReplyDigest::BYTES];
    hex::decode_to_slice(entry, &mut bytes).ok()?;
    ReplyDigest::from_bytes(&bytes)
}
