//! `--custom-generate-command`: a conversation that makes one sample. The hook asks for a generation or says what the
//! sample is. It is told all generations so far, or where it has the answer open the last one.

use std::ops::ControlFlow;
use std::pin::pin;

use driftless_agent::message::{Json, Refusal};
use driftless_bridge::engine::Finish;
use driftless_bridge::{Generation, SamplingParams};
use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::clients::{Asked, Patience, Seat};
use super::command::{ATTEMPTS, Broken};
use super::many::Talk;
use super::sample::{Claim, Made, assemble, once, tell};
use super::{Fault, GENERATIONS_MAX, Hook, line, parsed};
use crate::data::Tokenizer;
use crate::error::Result;
use crate::failure::Failure;
use crate::sample::{Prompt, Read, Trajectory, Turn};

/// Samples that an answer may become.
const SAMPLES_MAX: usize = 1024;

const EXPECTED: &str = "{\"generate\": {…}} or {\"samples\": [{…}]} as docs/hooks.md has them";

#[derive(Serialize)]
struct Question<'a> {
    index: u64,
    prompt: &'a str,
    input_ids: &'a [i32],
    label: Option<&'a RawValue>,
    metadata: Option<&'a RawValue>,
    /// What the prompt was rendered from, and the tools of its row.
    messages: Option<&'a RawValue>,
    tools: Option<&'a RawValue>,
    /// Under SGLang's names.
    sampling_params: &'a Value,
    evaluation: bool,
    generations: &'a [Said],
    /// Where clients get tokens that become a part of the answer, and what they have to know.
    #[serde(skip_serializing_if = "Option::is_none")]
    base_url: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    api_key: Option<&'a str>,
}

/// A generation that an open answer is told of.
#[derive(Serialize)]
struct Told<'a> {
    id: u64,
    /// Its number in the answer, from 1.
    turn: usize,
    generation: Option<&'a Said>,
}

/// A generation as the hook is told of it, or why there is none.
#[derive(Default, Serialize)]
struct Said {
    /// What the engine read; an open answer is not told what it knows.
    #[serde(skip_serializing_if = "Option::is_none")]
    input_ids: Option<Vec<i32>>,
    /// What `append` or `append_messages` has become, for an open answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    appended_ids: Option<Vec<i32>>,
    output_ids: Vec<i32>,
    log_probs: Vec<f32>,
    text: String,
    /// The answer as a message of OpenAI's form, where the template is of a known family.
    #[serde(skip_serializing_if = "Option::is_none")]
    message: Option<Value>,
    finish_reason: &'static str,
    /// Why no engine was asked.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
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
    /// Messages of OpenAI's form behind all so far.
    append_messages: Option<Vec<Json>>,
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
    /// The prompt; once something is made, what the last generation read and wrote.
    so_far: Vec<i32>,
    /// What clients of the hook had drawn. None of it is told to the hook, or gone on with by its own generations.
    drawn: Vec<Made>,
    /// Generations that were refused, and not made.
    refused: usize,
    /// What the next question tells of both.
    said: Vec<Said>,
    /// The answer, where the process has it open.
    talk: Option<Talk>,
    /// Whether the process of an earlier try ended.
    begun_again: bool,
    /// Whether the last generation found no room in the context.
    is_full: bool,
    /// Where the hook's clients ask.
    seat: Option<Seat>,
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
            so_far: prompt.tokens.clone(),
            drawn: Vec::new(),
            refused: 0,
            said: Vec::new(),
            talk: None,
            begun_again: false,
            is_full: false,
            seat: None,
        };
        let refused = |fault| self.refused(format_args!("sample {}, {}", turn.sample, prompt.place), fault);
        if let Some(clients) = &self.clients {
            conversation.seat = Some(clients.open(turn).await.map_err(refused)?);
        }
        loop {
            let next = conversation.next().await?;
            let next = next.map_err(|fault| refused(conversation.typed(fault)))?;
            match conversation.wanted(next).await.map_err(refused)? {
                ControlFlow::Continue(wanted) => conversation.generate(wanted).await?.map_err(refused)?,
                ControlFlow::Break(samples) => return Ok(samples),
            }
        }
    }
}

impl Conversation<'_> {
    /// An error of the hook, by what it last heard of where it does not say itself what kind it is.
    fn typed(&self, fault: Fault) -> Fault {
        let heard = match &self.seat {
            _ if self.is_full => Failure::Context,
            Some(seat) => seat.refused().unwrap_or(Failure::Hook),
            None => Failure::Hook,
        };
        Fault { failure: fault.failure.or(Some(heard)), ..fault }
    }

    /// What the hook says to what was made so far.
    async fn next(&mut self) -> Result<Result<Next, Fault>> {
        if let Some(talk) = self.talk.take() {
            let patience = self.patience();
            match self.say(talk, &patience).await? {
                Ok(ControlFlow::Break(next)) => return Ok(Ok(next)),
                Err(fault) => return Ok(Err(fault)),
                Ok(ControlFlow::Continue(())) => {
                    if let Err(fault) = self.begin_again().await {
                        return Ok(Err(fault));
                    }
                }
            }
        }
        loop {
            match self.ask().await? {
                Err(fault) if self.seat.is_some() && fault.has_ended() && !self.begun_again => {
                    if let Err(fault) = self.begin_again().await {
                        return Ok(Err(fault));
                    }
                }
                asked => return Ok(asked),
            }
        }
    }

    fn patience(&self) -> Patience {
        match &self.seat {
            Some(seat) => seat.patience(self.hook.deadline),
            None => self.hook.deadline.into(),
        }
    }

    /// Forgets what was made for a process that has ended: what it knew went with it. Another one may ask its clients for
    /// something else, so that they get a session of their own.
    async fn begin_again(&mut self) -> Result<(), Fault> {
        self.begun_again = true;
        self.made.clear();
        self.said.clear();
        (self.refused, self.so_far) = (0, self.prompt.tokens.clone());
        if let Some(clients) = &self.hook.clients {
            self.seat = Some(clients.open(self.turn).await?);
            self.drawn.clear();
        }
        Ok(())
    }

    /// Asks a process for the whole answer.
    async fn ask(&mut self) -> Result<Result<Next, Fault>> {
        let question = Question {
            index: self.turn.sample,
            prompt: &self.prompt.text,
            input_ids: &self.prompt.tokens,
            label: self.prompt.label.as_deref(),
            metadata: self.prompt.metadata.as_deref(),
            messages: self.prompt.messages.as_deref(),
            tools: self.prompt.tools.as_deref(),
            sampling_params: &self.sampling_params,
            evaluation: self.turn.evaluation,
            generations: &self.said,
            base_url: self.seat.as_ref().map(|seat| seat.base_url.as_str()),
            api_key: self.seat.as_ref().map(|seat| seat.api_key.as_str()),
        };
        let asked = match self.hook.asked("generate", &question, EXPECTED) {
            Ok(asked) => asked,
            Err(fault) => return Ok(Err(fault)),
        };
        // One that ends is not asked again here, where clients had something drawn for it.
        let attempts = if self.seat.is_some() { 1 } else { ATTEMPTS };
        let hook = self.hook;
        let asking = hook.begin(asked, EXPECTED, self.patience(), attempts);
        let begun = self.beside_clients(asking).await?;
        Ok(begun.map(|(next, talk)| {
            self.talk = talk;
            next
        }))
    }

    /// Tells the process of the last generation. It goes on if another process has to be asked.
    async fn say(&mut self, mut talk: Talk, patience: &Patience) -> Result<Result<ControlFlow<Next>, Fault>> {
        let told = Told { id: talk.id(), turn: self.made.len() + self.refused, generation: self.said.last() };
        let told = match line(&told, EXPECTED) {
            Ok(told) => told,
            Err(fault) => return Ok(Err(fault)),
        };
        Ok(match self.beside_clients(talk.say(told, patience)).await? {
            Ok(answer) => {
                self.talk = Some(talk);
                parsed(&answer, EXPECTED).map(ControlFlow::Break)
            }
            Err(Broken::Ended(_)) if !self.begun_again => Ok(ControlFlow::Continue(())),
            Err(broken) => Err(Fault::away(EXPECTED, broken.silent())),
        })
    }

    /// Waits for the hook, and draws what its clients ask for meanwhile, side by side. What is being drawn when the hook
    /// is heard is drawn to its end.
    async fn beside_clients<T>(&mut self, heard: impl Future<Output = T>) -> Result<T> {
        let (mut heard, mut drawing) = (pin!(heard), FuturesUnordered::new());
        let heard = loop {
            let count = self.count() + drawing.len();
            tokio::select! {
                biased;
                heard = &mut heard => break heard,
                Some(made) = drawing.next() => self.drew(made?),
                Some(asked) = next(&mut self.seat) => drawing.extend(asked.within(count).map(|asked| draw(self.turn, asked))),
            }
        };
        while let Some(made) = drawing.next().await {
            self.drew(made?);
        }
        Ok(heard)
    }

    /// Takes what was drawn for a client.
    fn drew(&mut self, made: Made) {
        self.is_full = has_no_room(&made.generation);
        self.drawn.push(made);
    }

    /// Generations of the answer so far, whoever asked for them, and those that were refused.
    fn count(&self) -> usize {
        self.made.len() + self.drawn.len() + self.refused
    }

    /// The generation that is asked for, or else what the answer is.
    async fn wanted(&mut self, next: Next) -> Result<ControlFlow<Vec<Trajectory>, Wanted>, Fault> {
        match next {
            Next { generate: Some(wanted), samples: None } if self.count() < GENERATIONS_MAX => {
                Ok(ControlFlow::Continue(wanted))
            }
            Next { generate: Some(_), samples: None } => {
                let expected = format!("a sample after at most {GENERATIONS_MAX} generations");
                Err(Fault::of(expected, "that it asks for another one"))
            }
            Next { generate: None, samples: Some(claims) } if (1..=SAMPLES_MAX).contains(&claims.len()) => {
                self.samples(claims).await.map(ControlFlow::Break)
            }
            Next { generate: None, samples: Some(claims) } => {
                Err(Fault::of(format_args!("1 to {SAMPLES_MAX} samples"), claims.len()))
            }
            _ => Err(Fault::of(EXPECTED, "neither, or both")),
        }
    }

    /// The samples of an answer. The conversations of the hook's clients, if they had any, stand for a claim without
    /// tokens. A further such claim says more of the answer, and has no samples of its own.
    async fn samples(&mut self, claims: Vec<Claim>) -> Result<Vec<Trajectory>, Fault> {
        let (prompt, vocabulary) = (&self.prompt.tokens, self.turn.vocabulary);
        let conversations = match &mut self.seat {
            Some(seat) => seat.claims().await?,
            None => Vec::new(),
        };
        let mut samples: Vec<Trajectory> = Vec::new();
        let mut is_told = false;
        for mut claim in claims {
            if conversations.is_empty() && !self.made.is_empty() {
                claim.tokens.get_or_insert_with(|| self.so_far.clone());
            }
            if claim.tokens.is_some() || conversations.is_empty() {
                samples.push(assemble(claim, prompt, &self.made, vocabulary)?);
                continue;
            }
            if let (true, Some(last)) = (is_told, samples.last_mut()) {
                tell(last, &claim)?;
                continue;
            }
            is_told = true;
            for one in &conversations {
                let Claim { tokens, prompt_len, loss_mask, .. } = one.clone();
                let one = Claim { tokens, prompt_len, loss_mask, ..claim.clone() };
                samples.push(assemble(one, prompt, &self.drawn, vocabulary)?);
            }
        }
        once(&mut samples);
        Ok(samples)
    }

    /// Has an engine generate.
    async fn generate(&mut self, wanted: Wanted) -> Result<Result<(), Fault>> {
        // Tokenised alone: what an engine wrote stays as it is.
        let appended = match (&wanted.input_ids, wanted.append, wanted.append_messages) {
            (None, Some(text), None) => Some(self.tokenizer.encode(&text)?),
            (None, None, Some(messages)) if !messages.is_empty() => match self.rendered(&messages) {
                Ok(appended) => Some(appended),
                Err(refusal) => {
                    self.refused += 1;
                    let error = Some(refusal.to_string());
                    self.tell(Said { finish_reason: "refused", error, ..Said::default() });
                    return Ok(Ok(()));
                }
            },
            (_, None, None) | (None, None, Some(_)) => None,
            _ => {
                let expected = "one of `input_ids`, `append` and `append_messages`";
                return Ok(Err(Fault::of(expected, "two of them, or all")));
            }
        };
        let so_far = || [self.so_far.as_slice(), appended.as_deref().unwrap_or_default()].concat();
        let input_ids = wanted.input_ids.unwrap_or_else(so_far);
        let (nth, sampling) = (self.made.len() as u64, wanted.sampling_params.of(&self.turn.sampling));
        let generation = self.turn.generate(nth, input_ids.clone(), sampling).await?;
        self.is_full = has_no_room(&generation);
        let is_open = self.talk.is_some();
        let message = self.message(&input_ids, &generation.output_ids);
        let said = Said {
            input_ids: (!is_open).then(|| input_ids.clone()),
            appended_ids: appended.filter(|_| is_open),
            output_ids: generation.output_ids.clone(),
            log_probs: generation.log_probs.clone(),
            text: self.tokenizer.decode(&generation.output_ids)?,
            message,
            finish_reason: match generation.finish {
                Finish::Stop => "stop",
                Finish::Length => "length",
                _ => "abort",
            },
            error: None,
        };
        self.tell(said);
        self.so_far = [input_ids.as_slice(), &generation.output_ids].concat();
        self.made.push(Made { read: Read::of(&input_ids), generation });
        Ok(Ok(()))
    }

    /// Has the hook told of a generation: of the last one alone, where it knows the others.
    fn tell(&mut self, said: Said) {
        if self.talk.is_some() {
            self.said.clear();
        }
        self.said.push(said);
    }

    /// Ids of messages behind the last generation.
    fn rendered(&self, messages: &[Json]) -> Result<Vec<i32>, Refusal> {
        let refused =
            |expected| Refusal::Invalid(format!("append_messages: expected {expected}, found none"));
        let clients = self.hook.clients.as_ref();
        let clients = clients.ok_or_else(|| refused("a command, and a template of a known family"))?;
        let last = self.made.last().ok_or_else(|| refused("a generation before them"))?;
        let given = self.so_far.len() - last.generation.output_ids.len();
        let (given, sampled) = self.so_far.split_at(given);
        clients.family().append(messages, given, sampled)
    }

    /// A generation as a message, where the template is of a known family.
    fn message(&self, given: &[i32], sampled: &[i32]) -> Option<Value> {
        let family = self.hook.clients.as_ref()?.family();
        let (tools, nth) = (self.prompt.tools.as_deref().map(RawValue::get), self.made.len());
        family.answer(given, sampled, tools, &format!("call_{nth}")).ok()
    }
}

/// What a client asks next; nothing where the answer has no clients.
async fn next(seat: &mut Option<Seat>) -> Option<Asked> {
    seat.as_mut()?.next().await
}

/// Draws tokens for a client.
async fn draw(turn: &Turn<'_>, Asked { nth, input_ids, sampling, reply }: Asked) -> Result<Made> {
    let read = Read::of(&input_ids);
    let drawn = turn.generate(nth, input_ids, sampling).await;
    let told = drawn.as_ref().map(Generation::clone).map_err(|error| Refusal::Busy(error.to_string()));
    // A client that has gone finds its answer when it asks again.
    let _ = reply.send(told);
    Ok(Made { read, generation: drawn? })
}

/// Whether no engine was asked, as the context was full.
fn has_no_room(generation: &Generation) -> bool {
    generation.output_ids.is_empty() && matches!(generation.finish, Finish::Length)
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
