//! Which prompt of the data a group gets: the next one, but for those that rest because they were easy. What is known of
//! them follows from the log alone.

use std::collections::HashMap;

use driftless_buffer::{Kind, PromptState, Reader};

use super::parts::raw_reward;
use super::record::{PromptNote, Scored};
use crate::data::Order;
use crate::error::Result;

/// Gives groups their places in the order of the data.
#[derive(Debug)]
pub(super) struct Curriculum {
    /// The place that is next.
    next: u64,
    rests: Option<Rests>,
}

/// The prompts that were easy.
#[derive(Debug)]
struct Rests {
    order: Order,
    threshold: f64,
    prompts: HashMap<u64, Easy>,
}

/// How often in a row a prompt was easy, and in which epoch last.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Easy {
    times: u64,
    epoch: u64,
}

impl Curriculum {
    /// As it goes on behind what a log has. Without a threshold nothing rests, and without an order nothing comes again.
    ///
    /// # Errors
    /// Those of the log.
    pub(super) fn open(log: &Reader, order: Option<Order>, threshold: Option<f64>) -> Result<Self> {
        let number = log.next_prompt();
        let last = number.checked_sub(1).map(|last| log.prompt(last)).transpose()?.flatten();
        let next = last.map_or(number, |record| PromptNote::of(&record).asked(number - 1) + 1);
        let rests = order.zip(threshold);
        let rests = rests.map(|(order, threshold)| Rests { order, threshold, prompts: HashMap::new() });
        let mut curriculum = Curriculum { next, rests };
        if curriculum.rests.is_some() {
            curriculum.read(log);
        }
        Ok(curriculum)
    }

    /// Sees all that a log has, in the order in which it came.
    fn read(&mut self, log: &Reader) {
        let mut open: HashMap<u64, Vec<f32>> = HashMap::new();
        // What is damaged is told by `log verify`.
        for record in log.iter(log.oldest()).flatten() {
            let scalars = record.scalars();
            match record.kind() {
                Kind::Score => open.entry(scalars.group_id).or_default().push(raw_reward(&record)),
                Kind::Prompt if record.prompt_state() == PromptState::Done => {
                    let rewards = open.remove(&scalars.sample_id).unwrap_or_default();
                    self.learn(PromptNote::of(&record).asked(scalars.sample_id), &rewards);
                }
                _ => {}
            }
        }
    }

    /// The place of a new group.
    pub(super) fn take(&mut self) -> u64 {
        let rests = |place: &u64| self.rests.as_ref().is_some_and(|rests| rests.rests(*place));
        let epoch = self.rests.as_ref().map_or(1, |rests| rests.order.prompts);
        // Where all rest, none does.
        let place = (self.next..).take(epoch as usize).find(|place| !rests(place)).unwrap_or(self.next);
        self.next = place + 1;
        place
    }

    /// Takes note of the scores of a group.
    pub(super) fn see(&mut self, place: u64, scores: &[Scored]) {
        let rewards: Vec<f32> = scores.iter().filter_map(|score| score.rewards.first().copied()).collect();
        self.learn(place, &rewards);
    }

    fn learn(&mut self, place: u64, rewards: &[f32]) {
        let Some(rests) = self.rests.as_mut().filter(|_| !rewards.is_empty()) else { return };
        let mean = rewards.iter().map(|reward| f64::from(*reward)).sum::<f64>() / rewards.len() as f64;
        let (prompt, epoch) = rests.order.at(place);
        let easy = rests.prompts.entry(prompt).or_default();
        let times = if mean >= rests.threshold { easy.times + 1 } else { 0 };
        *easy = Easy { times, epoch: easy.epoch.max(epoch) };
    }
}

impl Rests {
    /// A prompt rests as many epochs as it was easy in a row.
    fn rests(&self, place: u64) -> bool {
        let (prompt, epoch) = self.order.at(place);
        self.prompts.get(&prompt).is_some_and(|easy| easy.times > 0 && epoch <= easy.epoch + easy.times)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(prompts: u64) -> Curriculum {
        let order = Order { prompts, shuffle: false, seed: 0 };
        Curriculum { next: 0, rests: Some(Rests { order, threshold: 0.9, prompts: HashMap::new() }) }
    }

    /// The prompts of the next groups, of which those in `easy` are solved.
    fn prompts(curriculum: &mut Curriculum, groups: usize, easy: &[u64]) -> Vec<u64> {
        let count = curriculum.rests.as_ref().map_or(1, |rests| rests.order.prompts);
        let group = |_| {
            let place = curriculum.take();
            let prompt = place % count;
            curriculum.learn(place, &if easy.contains(&prompt) { [1.0, 0.9] } else { [1.0, 0.5] });
            prompt
        };
        (0..groups).map(group).collect()
    }

    #[test]
    fn an_easy_prompt_rests_longer_each_time_and_a_hard_one_never() {
        let mut curriculum = of(3);
        let epochs = [&[0, 1, 2][..], &[0, 2], &[0, 1, 2], &[0, 2], &[0, 2], &[0, 1, 2]].concat();
        assert_eq!(prompts(&mut curriculum, epochs.len(), &[1]), epochs);
        // It is hard once more, and comes in each epoch.
        let mut curriculum = of(2);
        assert_eq!(prompts(&mut curriculum, 3, &[1]), [0, 1, 0]);
        assert_eq!(prompts(&mut curriculum, 6, &[]), [0, 1, 0, 1, 0, 1]);
    }

    #[test]
    fn where_all_prompts_are_easy_all_of_them_are_taken() {
        assert_eq!(prompts(&mut of(2), 6, &[0, 1]), [0, 1, 0, 1, 0, 1]);
    }

    #[test]
    fn without_a_threshold_places_are_the_groups_own() {
        let mut curriculum = Curriculum { next: 7, rests: None };
        curriculum.learn(3, &[1.0]);
        assert_eq!([curriculum.take(), curriculum.take()], [7, 8]);
    }
}
