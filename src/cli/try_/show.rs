//! An answer, token by token, for people.

use crate::cli::shared::error::Result;
use crate::cli::shared::output::printable;
use driftless::trainer::Failure;
use driftless::trainer::data::Tokenizer;
use driftless::trainer::sample::Trajectory;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::IsTerminal as _;

/// What is shown of an answer.
#[derive(serde::Serialize)]
pub(super) struct Shown {
    pub(super) prompt_id: u64,
    /// Number of the answer in the run.
    pub(super) answer: u64,
    /// Why it failed, if it did.
    pub(super) outcome: Option<Failure>,
    /// None where the answer failed, or its reward.
    pub(super) reward: Option<f32>,
    /// What it is made of, by name.
    pub(super) rewards: BTreeMap<String, f32>,
    pub(super) seconds: f64,
    pub(super) reward_seconds: Option<f64>,
    pub(super) samples: Vec<Sample>,
}

/// A sample with its texts.
#[derive(serde::Serialize)]
pub(super) struct Sample {
    tokens: Vec<i32>,
    prompt_len: usize,
    loss_mask: Vec<u8>,
    log_probs: Vec<f32>,
    versions: Vec<u64>,
    finish: String,
    engine: String,
    /// In the order of the tokens.
    texts: Vec<Text>,
}

/// Neighbouring tokens of one kind.
#[derive(serde::Serialize)]
struct Text {
    part: Part,
    tokens: usize,
    text: String,
}

#[derive(Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
enum Part {
    Prompt,
    Trained,
    Masked,
}

/// The samples of an answer; what the model would have read, if there are none.
pub(super) fn samples(tokenizer: &Tokenizer, prompt: &[i32], parts: &[Trajectory]) -> Result<Vec<Sample>> {
    if parts.is_empty() {
        return Ok(vec![Sample {
            tokens: prompt.to_vec(),
            prompt_len: prompt.len(),
            loss_mask: Vec::new(),
            log_probs: Vec::new(),
            versions: Vec::new(),
            finish: "none".to_owned(),
            engine: String::new(),
            texts: texts(tokenizer, prompt, prompt.len(), &[])?,
        }]);
    }
    parts.iter().map(|part| sample(tokenizer, part)).collect()
}

fn sample(tokenizer: &Tokenizer, part: &Trajectory) -> Result<Sample> {
    let mut versions: Vec<_> = part.spans.iter().map(|span| span.version).collect();
    versions.dedup();
    Ok(Sample {
        tokens: part.tokens.clone(),
        prompt_len: part.prompt_len,
        loss_mask: part.loss_mask.clone(),
        log_probs: part.log_probs.clone(),
        versions,
        finish: format!("{:?}", part.finish).to_lowercase(),
        engine: part.engine.clone(),
        texts: texts(tokenizer, &part.tokens, part.prompt_len, &part.loss_mask)?,
    })
}

fn texts(tokenizer: &Tokenizer, tokens: &[i32], prompt_len: usize, mask: &[u8]) -> Result<Vec<Text>> {
    let part = |at: usize| match at.checked_sub(prompt_len).map(|at| mask.get(at)) {
        None => Part::Prompt,
        Some(Some(1)) => Part::Trained,
        Some(_) => Part::Masked,
    };
    let parts: Vec<(Part, i32)> = tokens.iter().enumerate().map(|(at, id)| (part(at), *id)).collect();
    let runs = parts.chunk_by(|(one, _), (other, _)| one == other);
    let text = |run: &[(Part, i32)]| {
        let ids: Vec<i32> = run.iter().map(|(_, id)| *id).collect();
        Ok(Text { part: run[0].0, tokens: run.len(), text: exact(tokenizer, &ids)? })
    };
    runs.map(text).collect()
}

/// The text of ids, special tokens included.
fn exact(tokenizer: &Tokenizer, ids: &[i32]) -> Result<String> {
    let mut text = String::new();
    let special: Vec<bool> =
        ids.iter().map(|id| Ok(tokenizer.decode(&[*id])?.is_empty())).collect::<Result<_>>()?;
    let pairs: Vec<(i32, bool)> = ids.iter().copied().zip(special).collect();
    for run in pairs.chunk_by(|(_, one), (_, other)| one == other) {
        let ids: Vec<i32> = run.iter().map(|(id, _)| *id).collect();
        match run[0].1 {
            true => text.extend(ids.iter().map(|id| tokenizer.token(*id).unwrap_or_default())),
            false => text += &tokenizer.decode(&ids)?,
        }
    }
    Ok(text)
}

/// An answer for people: a line of facts for each sample, and its text.
pub(super) fn render(shown: &Shown) -> String {
    let is_coloured =
        std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|no| no.is_empty());
    rendered(shown, is_coloured)
}

fn rendered(shown: &Shown, is_coloured: bool) -> String {
    let Shown { prompt_id, answer, outcome, reward, rewards, seconds, reward_seconds, samples } = shown;
    let made_of = rewards.iter().map(|(name, number)| format!("{} {number}", printable(name)));
    let made_of = made_of.collect::<Vec<_>>().join(", ");
    let made_of = if made_of.is_empty() { made_of } else { format!(" ({made_of})") };
    let reward = reward.map_or_else(|| "none".to_owned(), |reward| reward.to_string());
    let took = reward_seconds.map_or_else(String::new, |seconds| format!(", its reward {seconds:.2} s"));
    let failed = outcome.map_or_else(String::new, |outcome| format!(", failed: {}", outcome.name()));
    let mut text = format!(
        "prompt {prompt_id}, answer {answer}: reward {reward}{made_of}{failed}; it took {seconds:.2} s{took}\n"
    );
    // Writing to a String does not fail.
    for sample in samples {
        let trained = sample.loss_mask.iter().filter(|mask| **mask == 1).count();
        let versions: Vec<_> = sample.versions.iter().map(u64::to_string).collect();
        let versions = if versions.is_empty() { "none".to_owned() } else { versions.join(", ") };
        let (prompt, response) = (sample.prompt_len, sample.tokens.len() - sample.prompt_len);
        let (finish, engine) = (&sample.finish, printable(&sample.engine));
        let _ = writeln!(
            text,
            "{prompt} tokens of prompt, {response} of response, {trained} of them trained; {finish}, version {versions} {engine}"
        );
        for Text { part, text: body, .. } in &sample.texts {
            let mark = match part {
                Part::Prompt => "  > ",
                Part::Trained => "  < ",
                Part::Masked => "  | ",
            };
            let (on, off) =
                if is_coloured && *part == Part::Trained { ("\x1b[32m", "\x1b[0m") } else { ("", "") };
            for line in body.lines() {
                let _ = writeln!(text, "{mark}{on}{}{off}", printable(line));
            }
        }
    }
    text
}
