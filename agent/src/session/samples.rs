//! What is trained of a session.

use driftless_bridge::engine::VersionSpan;
use serde::Serialize;

use super::{Node, Tree};
use crate::message::Ended;

/// A conversation from its root to a leaf, token by token.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Sample {
    /// Prompt and response.
    pub tokens: Vec<i32>,
    /// Tokens before the first one that was sampled.
    pub prompt_len: usize,
    /// Per response token: its log-probability when it was sampled; 0 where it was not.
    pub log_probs: Vec<f32>,
    /// Per response token: 1 to train on it. Each sampled token is trained in one sample only.
    pub loss_mask: Vec<u8>,
    /// Which weights drew which response tokens.
    pub spans: Vec<VersionSpan>,
    /// Why its last turn ended.
    pub ended: Ended,
    /// URL of the engine that wrote its end.
    pub engine: String,
    /// The branch that the client told of its last turn.
    pub branch: Option<String>,
    /// Turns of the model in it.
    pub turns: usize,
}

impl Tree {
    /// A sample for each leaf, in the order in which they were committed; the earliest has the tokens that it shares
    /// with others. Auxiliary turns are left out unless `auxiliary`, or the conversation goes on behind them, or the session
    /// has no others. Samples of more than `most` tokens end with an earlier turn.
    #[must_use]
    pub fn samples(&self, auxiliary: bool, most: usize) -> Vec<Sample> {
        let asked = self.asked();
        let auxiliary = auxiliary || !asked.contains(&true);
        let mut kept: Vec<bool> = Vec::with_capacity(self.nodes.len());
        for (node, asked) in self.nodes.iter().zip(asked) {
            let parent = node.turn.parent.is_none_or(|parent| kept[parent as usize]);
            kept.push(parent && (auxiliary || asked) && node.path as usize <= most);
        }
        let is_leaf = |node: &Node| !node.children.iter().any(|child| kept[*child as usize]);
        let mut owned = vec![false; self.nodes.len()];
        let leaves = self.nodes.iter().enumerate().filter(|(at, node)| kept[*at] && is_leaf(node));
        leaves.map(|(at, _)| self.sample(at as u32, &mut owned)).collect()
    }

    /// Of each turn, whether it is none of a client's housekeeping. Nobody goes on behind that.
    fn asked(&self) -> Vec<bool> {
        let mut asked: Vec<bool> = self.nodes.iter().map(|node| !node.turn.is_auxiliary).collect();
        for at in (0..self.nodes.len()).rev() {
            let below = &self.nodes[at].children;
            asked[at] = asked[at] || below.iter().any(|child| asked[*child as usize]);
        }
        asked
    }

    fn sample(&self, leaf: u32, owned: &mut [bool]) -> Sample {
        let last = &self.node(leaf).turn;
        let mut sample = Sample {
            tokens: Vec::new(),
            prompt_len: 0,
            log_probs: Vec::new(),
            loss_mask: Vec::new(),
            spans: Vec::new(),
            ended: last.ended,
            engine: last.engine.clone(),
            branch: last.branch.clone(),
            turns: 0,
        };
        let mut path: Vec<u32> = std::iter::successors(Some(leaf), |at| self.node(*at).turn.parent).collect();
        path.reverse();
        for at in path {
            let is_new = !std::mem::replace(&mut owned[at as usize], true);
            self.append(&mut sample, self.node(at), is_new);
        }
        sample
    }

    fn append(&self, sample: &mut Sample, node: &Node, is_trained: bool) {
        sample.tokens.extend(&self.ids[node.start..node.end]);
        if sample.turns == 0 {
            sample.prompt_len = node.sampled - node.start;
        } else {
            let given = sample.log_probs.len() + node.sampled - node.start;
            sample.log_probs.resize(given, 0.0);
            sample.loss_mask.resize(given, 0);
        }
        let shift = sample.log_probs.len() as u32;
        let spans = node.turn.spans.iter().cloned();
        sample.spans.extend(spans.map(|VersionSpan { label, start, end }| VersionSpan {
            label,
            start: start + shift,
            end: end + shift,
        }));
        sample.log_probs.extend(&self.log_probs[node.log_prob..][..node.end - node.sampled]);
        sample.loss_mask.resize(sample.log_probs.len(), u8::from(is_trained));
        sample.turns += 1;
    }
}
