//! A session: a tree of turns over columns of tokens that only grow.
//!
//! Pure: no clock, no I/O. What was sampled is never encoded again: a prompt is the stored ids of the path that the
//! conversation takes, and the ids of what is new.

mod equal;
mod samples;

use driftless_bridge::Generation;
use driftless_bridge::engine::VersionSpan;
use serde::{Deserialize, Serialize};

use crate::family::{Drawn, Family, Said};
use crate::message::{Answer, Ask, Ended, Message, Refusal, Role, Tools};
use crate::tools::Digest;
use equal::Mark;
pub use samples::Sample;

/// What a session may hold. Answers that are being drawn when it is full are kept too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bounds {
    /// Turns of the model.
    pub turns: usize,
    /// Tokens, each counted once.
    pub tokens: usize,
    /// Bytes of messages and tools.
    pub bytes: usize,
}

impl Default for Bounds {
    /// 4,096 turns, 16 million tokens, 256 MiB.
    fn default() -> Self {
        Bounds { turns: 4096, tokens: 16 << 20, bytes: 256 << 20 }
    }
}

/// What becomes of the thoughts of a turn once the user asks something else.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Thoughts {
    /// They stay, and a conversation stays one sample.
    #[default]
    Kept,
    /// Later prompts are without them. Each question with thoughts before it begins a sample.
    Stripped,
}

/// One turn of the model: what stood before it since the turn that it follows, and what was sampled.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Turn {
    /// The turn that it follows; none if it begins the conversation.
    pub parent: Option<u32>,
    /// Of a turn that begins a conversation: its tools.
    pub tools: Tools,
    /// Messages since `parent`, as the client wrote them, answers of tools in the order of their calls.
    pub messages: Vec<Message>,
    /// What the model answered, as the client was told.
    pub answer: Message,
    /// Why it ended.
    pub ended: Ended,
    /// The client's bound on new tokens.
    pub max_tokens: Option<u32>,
    /// Texts that end the answer.
    pub stop: Vec<String>,
    /// The branch that the client told.
    pub branch: Option<String>,
    /// Whether it is a client's housekeeping.
    pub is_auxiliary: bool,
    /// Which weights drew which sampled tokens.
    pub spans: Vec<VersionSpan>,
    /// URL of the engine that wrote its end.
    pub engine: String,
    /// Generations that were drawn for it.
    pub draws: u64,
    /// Sampled tokens that are thoughts. Older journals do not count them.
    #[serde(default)]
    pub thoughts: u64,
    /// Ids of what stands before the answer, since `parent`.
    #[serde(skip)]
    pub given: Vec<i32>,
    /// Sampled ids.
    #[serde(skip)]
    pub sampled: Vec<i32>,
    /// Their log-probabilities.
    #[serde(skip)]
    pub log_probs: Vec<f32>,
}

/// A turn in a tree. Its tokens are in the columns, and of its messages and tools there are marks alone.
#[derive(Debug)]
struct Node {
    turn: Turn,
    messages: Box<[Mark]>,
    answer: Mark,
    /// Of a turn that begins a conversation.
    tools: Digest,
    children: Vec<u32>,
    /// First column of what was given.
    start: usize,
    /// First column of what was sampled.
    sampled: usize,
    /// One past its last column.
    end: usize,
    /// The first of its log-probabilities. There is one of each sampled token.
    log_prob: usize,
    /// Tokens of the path from the root, its own with them.
    path: u64,
    /// As [`Plan::number`].
    number: u64,
}

/// All turns of a session.
#[derive(Debug)]
pub struct Tree {
    bounds: Bounds,
    thoughts: Thoughts,
    nodes: Vec<Node>,
    roots: Vec<u32>,
    ids: Vec<i32>,
    log_probs: Vec<f32>,
    bytes: usize,
}

/// What is to be drawn for an [`Ask`].
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// The turn that it follows.
    pub parent: Option<u32>,
    /// Ids behind that turn.
    pub given: Vec<i32>,
    /// Tokens of the path up to that turn.
    pub cached: u64,
    /// Follows from what is asked and what was asked before it in the conversation, and not from when. Draws that follow
    /// from it are the same in whatever order the asks of a session come.
    pub number: u64,
    /// What is asked, with the messages behind that turn alone, and with tools where it begins a conversation.
    ask: Ask,
    /// All tools that may be called.
    may_call: Tools,
    /// Of the messages and tools.
    marks: Vec<Mark>,
    tools: Digest,
    bytes: usize,
}

/// Where a conversation stands among the turns of a session.
#[derive(Debug)]
pub(crate) struct Place {
    marks: Vec<Mark>,
    /// The last turn that it goes through.
    parent: Option<u32>,
    /// Messages behind that turn, and about how many bytes they have.
    rest: usize,
    bytes: usize,
    answered: Option<u32>,
}

/// What a client says, by marks.
struct Asked<'a> {
    ask: &'a Ask,
    marks: &'a [Mark],
    tools: Digest,
}

/// What a session makes of an [`Ask`].
#[derive(Debug, Clone, PartialEq)]
pub enum Seen {
    /// It was answered before, in this turn.
    Answered(u32),
    /// It is to be drawn.
    New(Box<Plan>),
}

impl Tree {
    /// An empty one.
    #[must_use]
    pub fn new(bounds: Bounds, thoughts: Thoughts) -> Self {
        let (nodes, roots, ids, log_probs) = Default::default();
        Tree { bounds, thoughts, nodes, roots, ids, log_probs, bytes: 0 }
    }

    /// Finds the place of a conversation, and the ids of what is new in it.
    ///
    /// # Errors
    /// [`Refusal`] of what is no conversation, of what the template refuses, and of a session that is full.
    pub fn see(&self, family: &Family, ask: &Ask) -> Result<Seen, Refusal> {
        self.see_at(family, ask, self.place(ask)?)
    }

    /// Finds the place of a conversation.
    ///
    /// # Errors
    /// [`Refusal::Invalid`] of what is no conversation.
    pub(crate) fn place(&self, ask: &Ask) -> Result<Place, Refusal> {
        if ask.messages.last().is_none_or(|last| last.role == Role::Assistant) {
            let expected = "`messages` whose last one is not the assistant's";
            return Err(Refusal::Invalid(format!("expected {expected}: answers are not continued")));
        }
        let messages = equal::in_order(&ask.messages);
        let marks = equal::marks(&messages);
        let whole = Asked { ask, marks: &marks, tools: ask.tools.digest() };
        let (mut rest, mut parent) = (whole.marks, None);
        while let Some(next) = self.next(parent, &whole, rest) {
            rest = &rest[self.nodes[next as usize].messages.len() + 1..];
            parent = Some(next);
        }
        // A turn may have begun anew with all that was said before it.
        let answered = self.answered(parent, &whole, rest).or_else(|| self.answered(None, &whole, &marks));
        let (rest, bytes) = (rest.len(), equal::bytes(&messages[messages.len() - rest.len()..]));
        Ok(Place { marks, parent, rest, bytes, answered })
    }

    /// [`Tree::see`] of a conversation at its place.
    ///
    /// # Errors
    /// [`Refusal`] of what the template refuses, and of a session that is full.
    pub(crate) fn see_at(&self, family: &Family, ask: &Ask, place: Place) -> Result<Seen, Refusal> {
        if let Some(found) = place.answered {
            return Ok(Seen::Answered(found));
        }
        let whole = Asked { ask, marks: &place.marks, tools: ask.tools.digest() };
        let messages = equal::in_order(&ask.messages);
        let plan = self.plan(family, &whole, &messages, place.parent, place.rest)?;
        self.has_room(&plan)?;
        Ok(Seen::New(Box::new(plan)))
    }

    fn plan(
        &self,
        family: &Family,
        asked: &Asked<'_>,
        messages: &[Message],
        parent: Option<u32>,
        rest: usize,
    ) -> Result<Plan, Refusal> {
        let (ask, rest) = (asked.ask, &messages[messages.len() - rest..]);
        let whole = |given| {
            let ask = Ask { messages: messages.to_vec(), ..ask.clone() };
            self.planned(None, given, ask, asked)
        };
        let Some(node) = parent.map(|parent| self.node(parent)) else {
            return Ok(whole(family.root(messages, &ask.tools)?));
        };
        let (before, sampled) = (&self.ids[node.start..node.sampled], &self.ids[node.sampled..node.end]);
        let Some(given) = family.behind(rest, before, sampled)? else {
            // A sibling from the root: its text is the template's, whatever was sampled before.
            return Ok(whole(family.root(messages, &ask.tools)?));
        };
        if self.thoughts == Thoughts::Stripped && rest.iter().any(|message| message.role == Role::User) {
            let without = self.without_thoughts(family, parent);
            if without.len() < node.path as usize {
                return Ok(whole([without, given].concat()));
            }
        }
        let (stop, branch) = (ask.stop.clone(), ask.branch.clone());
        let ask = Ask { messages: rest.to_vec(), tools: Tools::default(), stop, branch, ..*ask };
        Ok(self.planned(parent, given, ask, asked))
    }

    fn planned(&self, parent: Option<u32>, given: Vec<i32>, ask: Ask, asked: &Asked<'_>) -> Plan {
        let marks = asked.marks[asked.marks.len() - ask.messages.len()..].to_vec();
        let before = parent.map(|parent| self.node(parent));
        let number = number(before, &given, ask.max_tokens, &ask.stop, ask.branch.as_deref());
        let cached = before.map_or(0, |node| node.path);
        let bytes = equal::bytes(&ask.messages) + ask.tools.bytes();
        let may_call = asked.ask.tools.clone();
        Plan { parent, given, cached, number, ask, may_call, marks, tools: asked.tools, bytes }
    }

    /// The ids of a path, thoughts left out.
    fn without_thoughts(&self, family: &Family, last: Option<u32>) -> Vec<i32> {
        let path = self.path(last).into_iter();
        let turn = |node: &Node| {
            family.without_thoughts(&self.ids[node.start..node.sampled], &self.ids[node.sampled..node.end])
        };
        path.flat_map(turn).collect()
    }

    fn has_room(&self, plan: &Plan) -> Result<(), Refusal> {
        let Bounds { turns, tokens, bytes } = self.bounds;
        let over = |what: &str, most: usize| {
            Err(Refusal::Over(format!("the session is full: at most {most} {what} are kept of one")))
        };
        if self.nodes.len() >= turns {
            return over("turns", turns);
        }
        if self.ids.len() + plan.given.len() >= tokens {
            return over("tokens", tokens);
        }
        if self.bytes + plan.bytes > bytes {
            return over("bytes of messages", bytes);
        }
        Ok(())
    }

    fn below(&self, parent: Option<u32>) -> &[u32] {
        parent.map_or(&self.roots, |parent| &self.nodes[parent as usize].children)
    }

    /// The turn behind `parent` that the conversation goes through: with the most messages, and of these the one
    /// whose thoughts the client has too, of the client's own branch, and the earliest.
    fn next(&self, parent: Option<u32>, asked: &Asked<'_>, rest: &[Mark]) -> Option<u32> {
        let rank = |at: &&u32| {
            let node = self.node(**at);
            let (before, answer) = (rest.get(..node.messages.len())?, rest.get(node.messages.len())?);
            let fits = (parent.is_some() || node.tools == asked.tools)
                && answer.is(&node.answer)
                && equal::all(before, &node.messages);
            let has_thoughts = answer.thinks(&node.answer);
            let is_own = node.turn.branch == asked.ask.branch;
            fits.then_some((before.len(), has_thoughts, is_own, std::cmp::Reverse(**at)))
        };
        let ranked = self.below(parent).iter().filter_map(|at| Some((rank(&at)?, *at)));
        ranked.max_by_key(|(rank, _)| *rank).map(|(_, at)| at)
    }

    /// The turn that answered the same before.
    fn answered(&self, parent: Option<u32>, asked: &Asked<'_>, rest: &[Mark]) -> Option<u32> {
        let same = |at: &&u32| {
            let (node, ask) = (self.node(**at), asked.ask);
            let turn = &node.turn;
            (turn.max_tokens, &turn.stop, &turn.branch) == (ask.max_tokens, &ask.stop, &ask.branch)
                && (parent.is_some() || node.tools == asked.tools)
                && equal::all(rest, &node.messages)
        };
        self.below(parent).iter().find(same).copied()
    }

    /// All ids that an engine reads for a plan.
    #[must_use]
    pub fn prompt(&self, plan: &Plan) -> Vec<i32> {
        let mut prompt = Vec::with_capacity(plan.cached as usize + plan.given.len());
        for node in self.path(plan.parent) {
            prompt.extend(&self.ids[node.start..node.end]);
        }
        prompt.extend(&plan.given);
        prompt
    }

    /// Turns from the root to this one.
    fn path(&self, last: Option<u32>) -> Vec<&Node> {
        let mut path: Vec<&Node> =
            std::iter::successors(last, |at| self.node(*at).turn.parent).map(|at| self.node(at)).collect();
        path.reverse();
        path
    }

    fn node(&self, at: u32) -> &Node {
        &self.nodes[at as usize]
    }

    /// The turn that a generation makes of a plan, which [`Tree::commit`] takes.
    ///
    /// # Errors
    /// [`Refusal::Broken`] for tokens that the tokenizer cannot decode.
    pub fn turn(&self, family: &Family, plan: Plan, made: Generation, draws: u64) -> Result<Turn, Refusal> {
        let Plan { parent, given, number, ask, may_call, .. } = plan;
        let drawn = Drawn {
            given: &given,
            sampled: &made.output_ids,
            is_cut: made.finish == driftless_bridge::engine::Finish::Length,
            stop: &ask.stop,
            tools: &may_call,
        };
        let Said { message, ended } = family
            .said(&drawn, &format!("call_{number:016x}"))
            .map_err(|error| Refusal::Broken(error.to_string()))?;
        let Ask { messages, tools, max_tokens, stop, branch, is_auxiliary } = ask;
        let Generation { output_ids: sampled, log_probs, spans, engine, .. } = made;
        let (answer, thoughts) = (message, family.thoughts(&given, &sampled) as u64);
        Ok(Turn {
            parent,
            tools,
            messages,
            answer,
            ended,
            max_tokens,
            stop,
            branch,
            is_auxiliary,
            spans,
            engine,
            draws,
            thoughts,
            given,
            sampled,
            log_probs,
        })
    }

    /// Adds a turn. Turns of a journal give the same tree again, added in the same order.
    ///
    /// # Errors
    /// What is wrong with a turn that no tree made.
    pub fn commit(&mut self, mut turn: Turn) -> Result<u32, String> {
        let at = self.nodes.len() as u32;
        if turn.parent.is_some_and(|parent| parent >= at) {
            return Err(format!("expected a turn that follows one of {at}, found {:?}", turn.parent));
        }
        if turn.log_probs.len() != turn.sampled.len() {
            let found = turn.log_probs.len();
            return Err(format!("expected {} log-probabilities, found {found}", turn.sampled.len()));
        }
        let (given, tokens) = (std::mem::take(&mut turn.given), std::mem::take(&mut turn.sampled));
        let before = turn.parent.map(|parent| self.node(parent));
        let number = number(before, &given, turn.max_tokens, &turn.stop, turn.branch.as_deref());
        let path = before.map_or(0, |before| before.path) + (given.len() + tokens.len()) as u64;
        let start = self.ids.len();
        let sampled = start + given.len();
        let end = sampled + tokens.len();
        let log_prob = self.log_probs.len();
        grow(&mut self.ids, end - start);
        self.ids.extend(given);
        self.ids.extend(tokens);
        grow(&mut self.log_probs, end - sampled);
        self.log_probs.append(&mut turn.log_probs);
        let (messages, tools) = (std::mem::take(&mut turn.messages), std::mem::take(&mut turn.tools));
        self.bytes +=
            equal::bytes(&messages) + tools.bytes() + equal::bytes(std::slice::from_ref(&turn.answer));
        match turn.parent {
            None => self.roots.push(at),
            Some(parent) => self.nodes[parent as usize].children.push(at),
        }
        let (messages, tools) = (equal::marks(&messages).into(), tools.digest());
        let answer = Mark::of(&turn.answer);
        let children = Vec::new();
        let node =
            Node { turn, messages, answer, tools, children, start, sampled, end, log_prob, path, number };
        self.nodes.push(node);
        Ok(at)
    }

    /// What a client is told of a turn.
    #[must_use]
    pub fn answer(&self, at: u32) -> Answer {
        let node = self.node(at);
        let completion_tokens = (node.end - node.sampled) as u64;
        Answer {
            message: node.turn.answer.clone(),
            ended: node.turn.ended,
            prompt_tokens: node.path - completion_tokens,
            cached_tokens: node.turn.parent.map_or(0, |parent| self.node(parent).path),
            completion_tokens,
            reasoning_tokens: node.turn.thoughts,
        }
    }
}

impl Place {
    /// Whether a known conversation goes on by less than so many bytes.
    pub(crate) fn goes_on_by(&self, bytes: usize) -> bool {
        self.parent.is_some() && self.bytes < bytes
    }
}

impl Plan {
    /// Whether an answer to `earlier` is one to this.
    #[must_use]
    pub fn is_same(&self, earlier: &Self) -> bool {
        let (a, b) = (&self.ask, &earlier.ask);
        (self.parent, a.max_tokens, &a.stop, &a.branch) == (earlier.parent, b.max_tokens, &b.stop, &b.branch)
            && self.tools == earlier.tools
            && equal::all(&self.marks, &earlier.marks)
    }
}

/// Makes room for `more` and an eighth of what is there: a column at rest takes little more than its tokens.
fn grow<T>(column: &mut Vec<T>, more: usize) {
    if column.capacity() - column.len() < more {
        column.reserve_exact(more.max(column.len() / 8));
    }
}

/// [`Plan::number`] of a turn behind `before`.
fn number(
    before: Option<&Node>,
    given: &[i32],
    max_tokens: Option<u32>,
    stop: &[String],
    branch: Option<&str>,
) -> u64 {
    let mut digest = blake3::Hasher::new();
    digest.update(&before.map_or(0, |before| before.number).to_le_bytes());
    digest.update(given.iter().map(|id| id.to_le_bytes()).collect::<Vec<_>>().as_flattened());
    let asked = serde_json::json!([given.len(), max_tokens, stop, branch]);
    digest.update(asked.to_string().as_bytes());
    digest.finalize().as_bytes().first_chunk().copied().map_or(0, u64::from_le_bytes)
}
