//! Which prompt of the data a group gets: the next one, but for those that rest because they were easy. What is known of
//! them follows from the log alone.

use std::collections::HashMap;

use driftless_buffer::{PromptState, Reader};

use super::record::PromptNote;
use crate::data::Order;
use crate::error::Result;

/// Gives groups their places in the order of the data.
#[derive(Debug)]
pub(super) struct Curriculum {
    /// The place that is next.
    next: u64,
    /// Those of groups under way: the log may have lost what it says of them.
    open: HashMap<u64, u64>,
    rests: Option<Rests>,
}

/// The prompts that were easy.
#[derive(Debug, PartialEq)]
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
        let mut rests = order.zip(threshold).map(|(order, threshold)| Rests::new(order, threshold));
        if let Some(rests) = &mut rests {
            for prompt in log.prompts(PromptState::Done) {
                let note = PromptNote::of(&prompt);
                rests.know(note.asked(prompt.scalars().sample_id), note.easy.unwrap_or_default());
            }
        }
        Ok(Curriculum { next, open: HashMap::new(), rests })
    }

    /// The place of a new group.
    pub(super) fn take(&mut self, group: u64) -> u64 {
        let rests = |place: &u64| self.rests.as_ref().is_some_and(|rests| rests.rests(*place));
        // Up to the end of the next epoch, which has each prompt once. Where all of them rest, none does.
        let epoch = self.rests.as_ref().map_or(1, |rests| rests.order.prompts.max(1));
        let end = (self.next / epoch + 2).saturating_mul(epoch);
        let place = (self.next..end).find(|place| !rests(place)).unwrap_or(self.next);
        self.next = place + 1;
        self.open.insert(group, place);
        place
    }

    /// The place of a group that is known, which the log says if it is not under way.
    ///
    /// # Errors
    /// Those of the log.
    pub(super) fn place(&mut self, log: &Reader, group: u64) -> Result<u64> {
        if let Some(place) = self.open.get(&group) {
            return Ok(*place);
        }
        let prompt = log.prompt(group)?;
        let place = prompt.map_or(group, |prompt| PromptNote::of(&prompt).asked(group));
        self.open.insert(group, place);
        Ok(place)
    }

    /// Whether rewards say anything here.
    pub(super) fn looks_at_rewards(&self) -> bool {
        self.rests.is_some()
    }

    /// Takes note of the end of a group, and says how often in a row its prompt was easy.
    pub(super) fn see(&mut self, group: u64, rewards: &[f32]) -> Option<u64> {
        let place = self.open.remove(&group)?;
        let rests = self.rests.as_mut().filter(|_| !rewards.is_empty())?;
        let mean = rewards.iter().map(|reward| f64::from(*reward)).sum::<f64>() / rewards.len() as f64;
        let times = if mean >= rests.threshold { rests.times(place) + 1 } else { 0 };
        rests.know(place, times);
        Some(times)
    }
}

impl Rests {
    fn new(order: Order, threshold: f64) -> Self {
        Rests { order, threshold, prompts: HashMap::new() }
    }

    fn times(&self, place: u64) -> u64 {
        self.prompts.get(&self.order.at(place).0).map_or(0, |easy| easy.times)
    }

    /// Takes note of how often a prompt was easy by a place of it; what is known by a later place stays.
    fn know(&mut self, place: u64, times: u64) {
        let (prompt, epoch) = self.order.at(place);
        let easy = self.prompts.entry(prompt).or_default();
        if epoch >= easy.epoch {
            *easy = Easy { times, epoch };
        }
    }

    /// A prompt rests as many epochs as it was easy in a row.
    fn rests(&self, place: u64) -> bool {
        let (prompt, epoch) = self.order.at(place);
        self.prompts.get(&prompt).is_some_and(|easy| easy.times > 0 && epoch <= easy.epoch + easy.times)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::seed::mix;

    fn of(prompts: u64, shuffle: bool) -> Curriculum {
        let order = Order { prompts, shuffle, seed: 5 };
        Curriculum { next: 0, open: HashMap::new(), rests: Some(Rests::new(order, 0.9)) }
    }

    /// The prompts of the next groups, of which those in `easy` are solved.
    fn prompts(curriculum: &mut Curriculum, groups: u64, easy: impl Fn(u64) -> bool) -> Vec<u64> {
        let group = |group| {
            let place = curriculum.take(group);
            let prompt = curriculum.rests.as_ref().map_or(0, |rests| rests.order.at(place).0);
            curriculum.see(group, if easy(prompt) { &[1.0, 0.9] } else { &[1.0, 0.5] });
            prompt
        };
        (0..groups).map(group).collect()
    }

    #[test]
    fn an_easy_prompt_rests_longer_each_time_and_a_hard_one_never() {
        let mut curriculum = of(3, false);
        let epochs = [&[0, 1, 2][..], &[0, 2], &[0, 1, 2], &[0, 2], &[0, 2], &[0, 1, 2]].concat();
        assert_eq!(prompts(&mut curriculum, epochs.len() as u64, |prompt| prompt == 1), epochs);
        // It is hard once more, and comes in each epoch.
        let mut curriculum = of(2, false);
        assert_eq!(prompts(&mut curriculum, 3, |prompt| prompt == 1), [0, 1, 0]);
        assert_eq!(prompts(&mut curriculum, 6, |_| false), [0, 1, 0, 1, 0, 1]);
    }

    #[test]
    fn the_only_hard_prompt_comes_in_each_epoch_of_any_order() {
        let mut curriculum = of(100, true);
        // All are easy in the first epoch, but one; from the third on, the others come now and then.
        let taken = prompts(&mut curriculum, 100 + 2, |prompt| prompt != 7);
        assert_eq!(taken[100..], [7, taken[101]], "the second epoch has the hard one alone");
        assert_eq!(curriculum.rests.as_ref().map(|rests| rests.order.at(curriculum.next - 1).1), Some(2));
    }

    #[test]
    fn where_all_prompts_are_easy_all_of_them_are_taken() {
        assert_eq!(prompts(&mut of(2, false), 6, |_| true), [0, 1, 0, 1, 0, 1]);
    }

    #[test]
    fn log_gives_the_same_rests_in_any_order_of_ends() {
        for seed in 0..200 {
            let draw = |number: u64| mix(seed ^ mix(number));
            let mut live = of(1 + seed % 7, true);
            let (mut open, mut log) = (Vec::new(), Vec::new());
            for number in 0..60 {
                open.push((number, live.take(number)));
                while open.len() > 1 && draw(1000 + number + 100 * open.len() as u64).is_multiple_of(3) {
                    let (group, place) = open.swap_remove(draw(number) as usize % open.len());
                    let reward = if draw(group).is_multiple_of(2) { 1.0 } else { 0.0 };
                    log.push((place, live.see(group, &[reward]).unwrap_or_default()));
                }
            }
            let mut again = of(1 + seed % 7, true);
            if let Some(rests) = &mut again.rests {
                log.iter().for_each(|(place, times)| rests.know(*place, *times));
            }
            assert_eq!(again.rests, live.rests, "seed {seed}");
        }
    }

    #[test]
    fn without_a_threshold_places_are_the_groups_own() {
        let mut curriculum = Curriculum { next: 7, open: HashMap::new(), rests: None };
        assert_eq!([curriculum.take(7), curriculum.take(8)], [7, 8]);
        assert_eq!(curriculum.see(7, &[1.0]), None);
    }
}
