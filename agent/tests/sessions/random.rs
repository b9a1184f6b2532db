//! Random sessions: retries, forks, parallel tools, compaction, subagents, messages of the system, aborts, kills.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use driftless_agent::message::{Ask, Converse as _, Message, Role};
use driftless_agent::session::Sample;
use driftless_agent::{Family, Sessions, Tokenizer};
use driftless_bridge::engine::VersionSpan;
use futures_util::future::join_all;
use serde_json::json;
use tempfile::TempDir;

use crate::basic;
use crate::toy::{self, Dice, Drawn, Script, TEMPLATES, ask, message, user};

/// Sessions of a template and a tokenizer that are tried, and with `DRIFTLESS_LONG=1`. `DRIFTLESS_SIMULATE=SEED` asks for one,
/// `DRIFTLESS_SIMULATE=FIRST..LAST` for others.
const SEEDS: u64 = 4;
const SEEDS_LONG: u64 = 1000;
const NAME: &str = "s";

/// A conversation of one agent.
#[derive(Clone)]
struct Talk {
    messages: Vec<Message>,
    branch: Option<String>,
    tools: Vec<serde_json::Value>,
}

struct Run {
    home: TempDir,
    template: &'static str,
    /// A checkpoint's `tokenizer.json`; none for the small one of all families.
    tokenizer: Option<PathBuf>,
    script: Arc<Script>,
    sessions: Option<Sessions<Arc<Script>>>,
    dice: Dice,
    talks: Vec<Talk>,
    /// Asks that were answered, each with its answer.
    answered: Vec<(Ask, driftless_agent::message::Answer)>,
}

fn text(template: &str, dice: &mut Dice) -> String {
    let name = dice.pick(&["ls", "pwd", "grep"]);
    let mut call = |key| toy::call_of(template, name, key, &dice.below(9).to_string());
    let (call, other) = (call("a"), call("b"));
    let number = dice.below(1000);
    let text = match dice.below(6) {
        0 | 1 => call,
        2 => format!("{call}\n{other}"),
        3 if template == "qwen3" => format!("<think>\nWell, {number}.\n</think>\n\nThe answer is {number}."),
        4 => format!("Then {number}, código 日本.\n"),
        _ => format!("In the end {number}."),
    };
    // A model may end within thoughts that the template began.
    if dice.below(9) == 0 { text } else { toy::thought(template, &text) }
}

impl Run {
    fn new(template: &'static str, tokenizer: Option<PathBuf>, seed: u64) -> Self {
        let mut script = Script::over(template, opened(tokenizer.as_deref()));
        script.aborts = 4;
        let first =
            Talk { messages: vec![message(Role::System, "You help.")], branch: None, tools: Vec::new() };
        let mut run = Run {
            home: tempfile::tempdir().unwrap(),
            template,
            tokenizer,
            script: Arc::new(script),
            sessions: None,
            dice: Dice(seed),
            talks: vec![first],
            answered: Vec::new(),
        };
        run.kill();
        run
    }

    /// Ends the process, as far as its sessions can tell, and begins another one.
    fn kill(&mut self) {
        self.sessions = None;
        let family = Family::new(toy::template(self.template), opened(self.tokenizer.as_deref()));
        self.sessions = Some(basic::reopened_with(&self.home, family.unwrap(), &self.script));
    }

    async fn ask(&mut self, ask: Ask) -> driftless_agent::message::Answer {
        let before = self.script.drawn.lock().unwrap().len();
        let known =
            self.answered.iter().find(|(asked, _)| same(asked, &ask)).map(|(_, answer)| answer.clone());
        if known.is_none() {
            let text = text(self.template, &mut self.dice);
            *self.script.texts.lock().unwrap() = [text].into();
        }
        let answer = self.sessions.as_ref().unwrap().ask(NAME, ask.clone()).await.unwrap();
        if let Some(known) = known {
            assert_eq!(known, answer, "a retry");
            assert_eq!(self.script.drawn.lock().unwrap().len(), before, "a retry draws nothing");
        }
        self.answered.push((ask, answer.clone()));
        answer
    }

    async fn step(&mut self) {
        let at = self.dice.below(self.talks.len() as u64) as usize;
        let mut talk = self.talks[at].clone();
        let mut goes_on = talk.messages.last().is_some_and(|last| last.role == Role::Assistant);
        match self.dice.below(12) {
            // A subagent, with tools of its own.
            0 => {
                let tool = json!({"type": "function", "function": {"name": "ls", "parameters": {}}});
                let messages =
                    vec![message(Role::System, "A helper."), user(&format!("Do {}", self.dice.below(100)))];
                let branch = Some(format!("agent {}", self.talks.len()));
                self.talks.push(Talk { messages, branch, tools: vec![tool] });
                return;
            }
            // A conversation that is compacted.
            1 => {
                goes_on = false;
                talk.messages = vec![
                    message(Role::System, "You help."),
                    user(&format!("So far: {}", self.answered.len())),
                ];
            }
            // An edit of what was said before.
            2 if talk.messages.len() > 3 => {
                let kept = 1 + self.dice.below(talk.messages.len() as u64 - 1) as usize;
                talk.messages.truncate(kept);
                goes_on = false;
                if talk.messages.last().unwrap().role == Role::Assistant {
                    talk.messages.last_mut().unwrap().content += " (edited)";
                }
            }
            // A retry of anything.
            3 | 4 if !self.answered.is_empty() => {
                let (ask, _) = self.dice.pick(&self.answered);
                self.ask(ask).await;
                return;
            }
            5 => self.kill(),
            // Subagents at once, one of them by two equal requests.
            6 => return self.side_by_side().await,
            _ => {}
        }
        self.go_on(&mut talk);
        let asked =
            Ask { tools: talk.tools.clone().into(), branch: talk.branch.clone(), ..ask(&talk.messages) };
        let asked = Ask { is_auxiliary: self.dice.below(10) == 0, ..asked };
        let asked = Ask { max_tokens: (self.dice.below(5) == 0).then_some(9), ..asked };
        let answer = self.ask(asked).await;
        assert!(!goes_on || answer.cached_tokens > 0, "a conversation that goes on is not rendered anew");
        talk.messages.push(answer.message);
        match self.dice.below(4) {
            0 => self.talks.push(talk),
            _ => self.talks[at] = talk,
        }
    }

    async fn side_by_side(&mut self) {
        let mut asked: Vec<Ask> = (0..3)
            .map(|at| {
                let number = self.answered.len() * 10 + at;
                ask(&[message(Role::System, "A helper."), user(&format!("Part {number}?"))])
            })
            .collect();
        asked.push(asked[0].clone());
        *self.script.texts.lock().unwrap() = (0..3).map(|_| text(self.template, &mut self.dice)).collect();
        let sessions = self.sessions.as_ref().unwrap();
        let answers = join_all(asked.iter().map(|asked| sessions.ask(NAME, asked.clone()))).await;
        let answers: Vec<_> = answers.into_iter().map(Result::unwrap).collect();
        assert_eq!(answers[0], answers[3]);
        for (asked, answer) in asked.into_iter().zip(answers).take(3) {
            let messages = [asked.messages.as_slice(), std::slice::from_ref(&answer.message)].concat();
            self.talks.push(Talk { messages, branch: None, tools: Vec::new() });
            self.answered.push((asked, answer));
        }
    }

    /// What a client says behind the last message.
    fn go_on(&mut self, talk: &mut Talk) {
        let calls = talk.messages.last().map_or_else(Vec::new, |last| last.calls.clone());
        // Answers of tools come as they are ready.
        for call in calls.iter().rev() {
            let told = format!("{} told {}", call.name, self.dice.below(10));
            talk.messages.push(Message { call_id: Some(call.id.clone()), ..message(Role::Tool, &told) });
        }
        if self.dice.below(6) == 0 {
            talk.messages.push(message(Role::System, "Be brief."));
        }
        if talk.messages.last().is_none_or(|last| !matches!(last.role, Role::Tool | Role::User)) {
            talk.messages.push(user(&format!("Question {}? <|im_end|>", self.dice.below(50))));
        }
        // Clients of OpenAI's protocol give no thoughts back.
        if self.dice.below(4) == 0 {
            talk.messages.iter_mut().for_each(|message| message.reasoning = None);
        }
    }
}

fn same(a: &Ask, b: &Ask) -> bool {
    (&a.messages, &a.tools, &a.branch, a.max_tokens) == (&b.messages, &b.tools, &b.branch, b.max_tokens)
}

/// Every sampled token once, as an engine drew it: id, log-probability, version, behind the ids that it read.
fn check(samples: &[Sample], drawn: &[Drawn], is_complete: bool) {
    let mut left: HashMap<u64, usize> =
        drawn.iter().map(|drawn| (drawn.nth, drawn.made.output_ids.len())).collect();
    for sample in samples {
        let response = sample.tokens.len() - sample.prompt_len;
        assert_eq!((sample.log_probs.len(), sample.loss_mask.len()), (response, response));
        let mut trained = 0;
        for drawn in drawn {
            let Drawn { nth, input_ids, made, .. } = drawn;
            let whole = [input_ids.as_slice(), &made.output_ids].concat();
            let Some(start) = input_ids.len().checked_sub(sample.prompt_len) else { continue };
            let range = start..start + made.output_ids.len();
            let log_probs = sample.log_probs.get(range.clone());
            if !sample.tokens.starts_with(&whole) || log_probs != Some(&made.log_probs) {
                continue;
            }
            let drawn_by: Vec<_> = (0..made.output_ids.len()).map(|at| label(&made.spans, at)).collect();
            let kept: Vec<_> = range.clone().map(|at| label(&sample.spans, at)).collect();
            assert_eq!(kept, drawn_by, "versions of generation {nth}");
            let mask = &sample.loss_mask[range.clone()];
            if mask.contains(&1) {
                assert!(mask.iter().all(|mask| *mask == 1), "generation {nth} in part");
                assert_eq!(left.insert(*nth, 0), Some(mask.len()), "generation {nth} is trained twice");
                trained += mask.len();
            }
        }
        let masked: usize = sample.loss_mask.iter().map(|mask| usize::from(*mask)).sum();
        assert_eq!(trained, masked, "a trained token that no engine drew here");
        assert!(masked > 0, "a sample without a token of its own");
    }
    let left: usize = left.values().sum();
    assert!(!is_complete || left == 0, "{left} sampled tokens in no sample");
}

/// Which weights drew a token.
fn label(spans: &[VersionSpan], at: usize) -> &str {
    let mut spans = spans.iter().filter(|span| (span.start as usize..span.end as usize).contains(&at));
    let label = &spans.next().unwrap().label;
    assert!(spans.next().is_none(), "two versions of token {at}");
    label
}

fn seeds() -> std::ops::Range<u64> {
    let all = if std::env::var_os("DRIFTLESS_LONG").is_some() { SEEDS_LONG } else { SEEDS };
    let Ok(seeds) = std::env::var("DRIFTLESS_SIMULATE") else { return 0..all };
    match seeds.split_once("..") {
        Some((first, last)) => first.parse().unwrap()..last.parse().unwrap(),
        None => seeds.parse().unwrap()..seeds.parse::<u64>().unwrap() + 1,
    }
}

fn opened(tokenizer: Option<&Path>) -> Tokenizer {
    tokenizer.map_or_else(toy::tokenizer, |path| Tokenizer::open(path).unwrap())
}

/// The small tokenizer, and those of the checkpoints that `DRIFTLESS_TOKENIZERS` names, parted as in `PATH`.
fn tokenizers() -> Vec<Option<PathBuf>> {
    let named = std::env::var_os("DRIFTLESS_TOKENIZERS").unwrap_or_default();
    let named = std::env::split_paths(&named).filter(|path| !path.as_os_str().is_empty());
    std::iter::once(None).chain(named.map(Some)).collect()
}

/// Templates whose family a tokenizer has the tokens of, and the one that ends their answers.
fn templates(tokenizer: Option<&Path>) -> Vec<&'static str> {
    let has_tokens = |template: &&str| {
        let opened = opened(tokenizer);
        opened.encode(toy::end_of(template)).unwrap().len() == 1
            && Family::new(toy::template(template), opened).is_ok()
    };
    TEMPLATES.iter().map(|(template, _)| *template).filter(has_tokens).collect()
}

#[tokio::test]
async fn random_sessions_train_what_was_sampled_and_only_once() {
    let cases = tokenizers().into_iter().flat_map(|tokenizer| {
        let templates = templates(tokenizer.as_deref());
        assert!(!templates.is_empty(), "no template has the tokens of {tokenizer:?}");
        templates.into_iter().map(move |template| (tokenizer.clone(), template))
    });
    for (tokenizer, template) in cases {
        for seed in seeds() {
            println!("template {template}, tokenizer {tokenizer:?}, seed {seed}");
            let mut run = Run::new(template, tokenizer.clone(), seed);
            for _ in 0..30 {
                run.step().await;
            }
            let drawn = run.script.drawn.lock().unwrap().clone();
            let samples = |auxiliary| run.sessions.as_ref().unwrap().samples(NAME, auxiliary, usize::MAX);
            check(&samples(true).await.unwrap(), &drawn, true);
            check(&samples(false).await.unwrap(), &drawn, false);
            let before = samples(true).await.unwrap();
            run.kill();
            assert_eq!(run.sessions.as_ref().unwrap().samples(NAME, true, usize::MAX).await.unwrap(), before);
        }
    }
}
