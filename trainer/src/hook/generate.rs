//! `--custom-generate-command`: a conversation that makes one sample. The hook is asked with all generations
//! so far, and asks for another one or says what the sample is.

use driftless_bridge::engine::Finish;
use driftless_bridge::{Generation, SamplingParams};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::sample::{Claim, Made, assemble};
use super::{Fault, Hook};
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

/// A generation as the hook is told of it.
#[derive(Serialize)]
struct Said {
    input_ids: Vec<i32>,
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

impl Hook {
    /// Makes one answer to `prompt`.
    pub(crate) async fn converse(
        &self,
        tokenizer: &Tokenizer,
        prompt: &Prompt,
        turn: &Turn<'_>,
    ) -> Result<Vec<Trajectory>> {
        let refused = |fault| self.refused(format_args!("sample {}, {}", turn.sample, prompt.place), fault);
        let sampling = &turn.sampling;
        let sampling_params = json!({
            "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k,
            "max_new_tokens": sampling.max_new_tokens, "stop": sampling.stop,
            "stop_token_ids": sampling.stop_token_ids,
        });
        let (mut said, mut made) = (Vec::new(), Vec::new());
        loop {
            let question = Question {
                index: turn.sample,
                prompt: &prompt.text,
                input_ids: &prompt.tokens,
                label: prompt.label.as_deref(),
                metadata: prompt.metadata.as_deref(),
                sampling_params: &sampling_params,
                evaluation: turn.evaluation,
                generations: &said,
            };
            let wanted = match self.ask("generate", &question, EXPECTED).await.map_err(refused)? {
                Next { generate: Some(wanted), samples: None } => wanted,
                Next { generate: None, samples: Some(claims) }
                    if (1..=SAMPLES_MAX).contains(&claims.len()) =>
                {
                    let samples = claims.into_iter();
                    let samples =
                        samples.map(|claim| assemble(claim, &prompt.tokens, &made, turn.vocabulary));
                    return samples.collect::<Result<_, Fault>>().map_err(refused);
                }
                Next { generate: None, samples: Some(claims) } => {
                    let expected = format!("1 to {SAMPLES_MAX} samples");
                    return Err(refused(Fault::of(expected, claims.len())));
                }
                _ => return Err(refused(Fault::of(EXPECTED, "neither, or both"))),
            };
            if made.len() == GENERATIONS_MAX {
                let expected = format!("a sample after at most {GENERATIONS_MAX} generations");
                return Err(refused(Fault::of(expected, "that it asks for another one")));
            }
            let input_ids = wanted.input_ids(tokenizer, prompt, &made)?.map_err(refused)?;
            let sampling = wanted.sampling_params.of(sampling);
            let generation = turn.generate(made.len() as u64, input_ids.clone(), sampling).await?;
            said.push(tell(tokenizer, &input_ids, &generation)?);
            made.push(Made { input_ids, generation });
        }
    }
}

impl Wanted {
    /// What the model is to read.
    fn input_ids(
        &self,
        tokenizer: &Tokenizer,
        prompt: &Prompt,
        made: &[Made],
    ) -> Result<Result<Vec<i32>, Fault>> {
        let so_far = || match made.last() {
            Some(last) => [last.input_ids.as_slice(), &last.generation.output_ids].concat(),
            None => prompt.tokens.clone(),
        };
        Ok(match (&self.input_ids, &self.append) {
            (Some(_), Some(_)) => Err(Fault::of("`input_ids` or `append`", "both")),
            (Some(ids), None) => Ok(ids.clone()),
            // Tokenised alone: what an engine wrote stays as it is.
            (None, Some(text)) => Ok([so_far(), tokenizer.encode(text)?].concat()),
            (None, None) => Ok(so_far()),
        })
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

fn tell(tokenizer: &Tokenizer, input_ids: &[i32], generation: &Generation) -> Result<Said> {
    Ok(Said {
        input_ids: input_ids.to_vec(),
        output_ids: generation.output_ids.clone(),
        log_probs: generation.log_probs.clone(),
        text: tokenizer.decode(&generation.output_ids)?,
        finish_reason: match generation.finish {
            Finish::Stop => "stop",
            Finish::Length => "length",
            _ => "abort",
        },
    })
}
