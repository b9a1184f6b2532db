//! `--custom-generate-command`: a conversation that makes one sample. The hook asks for a generation or says what the
//! sample is. It is told all generations so far, or where it has the answer open the last one.

use std::ops::ControlFlow;

use driftless_bridge::SamplingParams;
use driftless_bridge::engine::Finish;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::command::Broken;
use super::many::Talk;
use super::sample::{Claim, Made, assemble};
use super::{Fault, Hook, line, parsed};
use crate::data::Tokenizer;
use crate::error::Result;
use crate::sample::{Prompt, Trajectory, Turn};

/// Samples that an answer may become.
const SAMPLES_MAX: usize = 1024;
/// Generations of one answer.
const GENERATIONS_MAX: usize = 256;

const EXPECTED: &str = "{\"generate\": {…}} or {\"samples\": [{…}]} as docs/hooks.md has them";

#[derive(Serialize)]
struct Question<'a> {
    index: u64,
    prompt: &'a str,
    input_ids: &'a [i32],
    label: Option<&'a RawValue>,
    metadata: Option<&'a RawValue>,
    /// Under SGLang's names.
    sampling_params: &'a Value,
    evaluation: bool,
    generations: &'a [Said],
}

/// A generation that an open answer is told of.
#[derive(Serialize)]
struct Told<'a> {
    id: u64,
    /// Its number in the answer, from 1.
    turn: usize,
    generation: Option<&'a Said>,
}

/// A generation as the hook is told of it.
#[derive(Serialize)]
struct Said {
    /// What the engine read; an open answer is not told what it knows.
    #[serde(skip_serializing_if = "Option::is_none")]
    input_ids: Option<Vec<i32>>,
    /// What `append` has become, for an open answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    appended_ids: Option<Vec<i32>>,
    output_ids: Vec<i32>,
    log_probs: Vec<f32>,
    text: String,
    finish_reason: &'static str,
}

#[derive(Deserialize)]
struct Next {
    generate: Option<Wanted>,
    samples: Option<Vec<Claim>>,
}

/// A generation that the hook asks for.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Wanted {
    /// What the model reads; all so far, if absent.
    input_ids: Option<Vec<i32>>,
    /// Text behind all so far.
    append: Option<String>,
    #[serde(default)]
    sampling_params: Overrides,
}

/// What a hook may change. Log-probs have the run's temperature in them.
#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Overrides {
    max_new_tokens: Option<u32>,
    stop: Option<Vec<String>>,
    stop_token_ids: Option<Vec<i32>>,
}

/// An answer that is being made.
struct Conversation<'a> {
    hook: &'a Hook,
    tokenizer: &'a Tokenizer,
    prompt: &'a Prompt,
    turn: &'a Turn<'a>,
    sampling_params: Value,
    made: Vec<Made>,
    /// What the next question tells of `made`.
    said: Vec<Said>,
    /// The answer, where the process has it open.
    talk: Option<Talk>,
    /// Whether the process of an earlier try ended.
    begun_again: bool,
}

impl Hook {
    /// Makes one answer to `prompt`.
    pub(crate) async fn converse(
        &self,
        tokenizer: &Tokenizer,
        prompt: &Prompt,
        turn: &Turn<'_>,
    ) -> Result<Vec<Trajectory>> {
        let sampling = &turn.sampling;
        let sampling_params = json!({
            "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k,
            "max_new_tokens": sampling.max_new_tokens, "stop": sampling.stop,
            "stop_token_ids": sampling.stop_token_ids,
        });
        let mut conversation = Conversation {
            hook: self,
            tokenizer,
            prompt,
            turn,
            sampling_params,
            made: Vec::new(),
            said: Vec::new(),
            talk: None,
            begun_again: false,
        };
        let refused = |fault| self.refused(format_args!("sample {}, {}", turn.sample, prompt.place), fault);
        loop {
            let next = conversation.next().await.map_err(refused)?;
            match conversation.wanted(next).map_err(refused)? {
                ControlFlow::Continue(wanted) => conversation.generate(wanted).await?.map_err(refused)?,
                ControlFlow::Break(samples) => return Ok(samples),
            }
        }
    }
}

impl Conversation<'_> {
    /// What the hook says to what was made so far.
    async fn next(&mut self) -> Result<Next, Fault> {
        if let Some(mut talk) = self.talk.take() {
            let told =
                line(&Told { id: talk.id(), turn: self.made.len(), generation: self.said.last() }, EXPECTED)?;
            match talk.say(told).await {
                Ok(answer) => {
                    self.talk = Some(talk);
                    return parsed(&answer, EXPECTED);
                }
                // What the process knew went with it.
                Err(Broken::Ended(_)) if !self.begun_again => {
                    self.begun_again = true;
                    self.made.clear();
                    self.said.clear();
                }
                Err(broken) => return Err(Fault::away(EXPECTED, broken.silent())),
            }
        }
        let question = Question {
            index: self.turn.sample,
            prompt: &self.prompt.text,
            input_ids: &self.prompt.tokens,
            label: self.prompt.label.as_deref(),
            metadata: self.prompt.metadata.as_deref(),
            sampling_params: &self.sampling_params,
            evaluation: self.turn.evaluation,
            generations: &self.said,
        };
        let (next, talk) = self.hook.begin("generate", &question, EXPECTED).await?;
        self.talk = talk;
        Ok(next)
    }

    /// The generation that is asked for, or else what the answer is.
    fn wanted(&self, next: Next) -> Result<ControlFlow<Vec<Trajectory>, Wanted>, Fault> {
        match next {
            Next { generate: Some(wanted), samples: None } if self.made.len() < GENERATIONS_MAX => {
                Ok(ControlFlow::Continue(wanted))
            }
            Next { generate: Some(_), samples: None } => {
                let expected = format!("a sample after at most {GENERATIONS_MAX} generations");
                Err(Fault::of(expected, "that it asks for another one"))
            }
            Next { generate: None, samples: Some(claims) } if (1..=SAMPLES_MAX).contains(&claims.len()) => {
                let (prompt, vocabulary) = (&self.prompt.tokens, self.turn.vocabulary);
                let samples = claims.into_iter().map(|claim| assemble(claim, prompt, &self.made, vocabulary));
                samples.collect::<Result<_, Fault>>().map(ControlFlow::Break)
            }
            Next { generate: None, samples: Some(claims) } => {
                Err(Fault::of(format_args!("1 to {SAMPLES_MAX} samples"), claims.len()))
            }
            _ => Err(Fault::of(EXPECTED, "neither, or both")),
        }
    }

    /// Has an engine generate.
    async fn generate(&mut self, wanted: Wanted) -> Result<Result<(), Fault>> {
        let so_far = || match self.made.last() {
            Some(last) => [last.input_ids.as_slice(), &last.generation.output_ids].concat(),
            None => self.prompt.tokens.clone(),
        };
        let (input_ids, appended) = match (wanted.input_ids, wanted.append) {
            (Some(_), Some(_)) => return Ok(Err(Fault::of("`input_ids` or `append`", "both"))),
            (Some(ids), None) => (ids, None),
            // Tokenised alone: what an engine wrote stays as it is.
            (None, Some(text)) => {
                let appended = self.tokenizer.encode(&text)?;
                ([so_far(), appended.clone()].concat(), Some(appended))
            }
            (None, None) => (so_far(), None),
        };
        let (nth, sampling) = (self.made.len() as u64, wanted.sampling_params.of(&self.turn.sampling));
        let generation = self.turn.generate(nth, input_ids.clone(), sampling).await?;
        let is_open = self.talk.is_some();
        if is_open {
            self.said.clear();
        }
        self.said.push(Said {
            input_ids: (!is_open).then(|| input_ids.clone()),
            appended_ids: appended.filter(|_| is_open),
            output_ids: generation.output_ids.clone(),
            log_probs: generation.log_probs.clone(),
            text: self.tokenizer.decode(&generation.output_ids)?,
            finish_reason: match generation.finish {
                Finish::Stop => "stop",
                Finish::Length => "length",
                _ => "abort",
            },
        });
        self.made.push(Made { input_ids, generation });
        Ok(Ok(()))
    }
}

impl Overrides {
    fn of(self, sampling: &SamplingParams) -> SamplingParams {
        SamplingParams {
            // Never more than the run's flag allows.
            max_new_tokens: self.max_new_tokens.unwrap_or(u32::MAX).min(sampling.max_new_tokens),
            stop: self.stop.unwrap_or_else(|| sampling.stop.clone()),
            stop_token_ids: self.stop_token_ids.unwrap_or_else(|| sampling.stop_token_ids.clone()),
            ..sampling.clone()
        }
    }
}
