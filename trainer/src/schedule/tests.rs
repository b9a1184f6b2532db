use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::*;

fn schedule(mode: Mode, batch: u64, steps: u64) -> Schedule {
    Schedule::new(Policy::new(mode, batch, steps))
}

fn started(schedule: &mut Schedule) -> Vec<(u64, u64)> {
    schedule.start().iter().map(|start| (start.group, start.seat)).collect()
}

/// Gives `step` its groups, and has it done and published.
fn train(schedule: &mut Schedule, step: u64) -> Vec<u64> {
    let groups = schedule.batch(step).unwrap();
    schedule.see(Seen::Taken { step, groups: groups.clone() });
    publish(schedule, step + 1);
    groups
}

fn publish(schedule: &mut Schedule, step: u64) {
    schedule.see(Seen::Trained(step));
    schedule.see(Seen::Published(step));
}

fn accept(schedule: &mut Schedule, groups: impl IntoIterator<Item = u64>) {
    groups.into_iter().for_each(|group| schedule.see(Seen::Accepted(group)));
}

#[test]
fn synchronous_batch_begins_once_the_step_before_is_done() {
    let mut schedule = schedule(Mode::Synchronous, 2, 3);
    assert_eq!(started(&mut schedule), [(0, 0), (1, 0)]);
    schedule.see(Seen::Accepted(0));
    schedule.see(Seen::LeftOut(1));
    assert_eq!(started(&mut schedule), [(2, 0)], "another group takes its place");
    assert_eq!(schedule.batch(0), None);
    schedule.see(Seen::Accepted(2));
    let groups = schedule.batch(0).unwrap();
    schedule.see(Seen::Taken { step: 0, groups });
    assert_eq!(started(&mut schedule), [], "while the step trains");
    publish(&mut schedule, 1);
    assert_eq!(started(&mut schedule), [(3, 1), (4, 1)]);
    accept(&mut schedule, 3..5);
    assert_eq!(train(&mut schedule, 1), [3, 4]);
    assert_eq!(started(&mut schedule), [(5, 2), (6, 2)]);
    accept(&mut schedule, 5..7);
    train(&mut schedule, 2);
    assert_eq!(started(&mut schedule), [], "the run is over");
}

#[test]
fn step_off_batch_begins_once_the_one_before_is_taken() {
    let mut schedule = schedule(Mode::OneStepOff, 2, 3);
    assert_eq!(started(&mut schedule), [(0, 0), (1, 0)]);
    accept(&mut schedule, 0..2);
    assert_eq!(started(&mut schedule), []);
    let groups = schedule.batch(0).unwrap();
    schedule.see(Seen::Taken { step: 0, groups });
    assert_eq!(started(&mut schedule), [(2, 1), (3, 1)]);
    accept(&mut schedule, 2..4);
    assert_eq!(started(&mut schedule), [], "one ahead");
    publish(&mut schedule, 1);
    let groups = schedule.batch(1).unwrap();
    schedule.see(Seen::Taken { step: 1, groups });
    assert_eq!(started(&mut schedule), [(4, 2), (5, 2)]);
}

/// Synchronous batches of two, with two groups more under way.
fn with_surplus(partial: bool) -> Schedule {
    Schedule::new(Policy { surplus: 2, partial, ..Policy::new(Mode::Synchronous, 2, 3) })
}

#[test]
fn surplus_groups_are_stopped_with_the_batch_and_begin_again() {
    let mut schedule = with_surplus(false);
    assert_eq!(started(&mut schedule), [(0, 0), (1, 0), (2, 0), (3, 0)]);
    accept(&mut schedule, [2, 0]);
    assert_eq!(schedule.stopped().count(), 0);
    let groups = schedule.batch(0).unwrap();
    assert_eq!(groups, [0, 2]);
    schedule.see(Seen::Taken { step: 0, groups });
    assert_eq!(schedule.stopped().collect::<Vec<_>>(), [1, 3]);
    // One has finished just before, and is kept.
    schedule.see(Seen::Accepted(3));
    schedule.see(Seen::Returned(1));
    assert_eq!((started(&mut schedule), schedule.stopped().count()), (vec![], 0), "while the step trains");
    publish(&mut schedule, 1);
    let groups: Vec<_> = started(&mut schedule).into_iter().map(|(group, _)| group).collect();
    assert_eq!(groups, [1, 4, 5], "what is finished counts");
    accept(&mut schedule, [4]);
    assert_eq!(schedule.batch(1).unwrap(), [3, 4]);
}

#[test]
fn surplus_groups_of_partial_rollouts_go_on() {
    let mut schedule = with_surplus(true);
    started(&mut schedule);
    accept(&mut schedule, [2, 0]);
    let groups = schedule.batch(0).unwrap();
    schedule.see(Seen::Taken { step: 0, groups });
    assert_eq!((started(&mut schedule), schedule.stopped().count()), (vec![], 0), "nothing is new");
    publish(&mut schedule, 1);
    assert_eq!(started(&mut schedule), [(4, 1), (5, 1)], "beside the two that go on");
    accept(&mut schedule, [1, 5]);
    assert_eq!(train(&mut schedule, 1), [1, 5]);
    assert_eq!(started(&mut schedule), [(6, 2), (7, 2)], "the last step has a surplus too");
}

#[test]
fn bounded_groups_are_at_most_so_far_ahead() {
    let mut schedule = schedule(Mode::Bounded { max_staleness: 1 }, 2, 9);
    assert_eq!(started(&mut schedule), [(0, 0), (1, 0), (2, 1), (3, 1)]);
    accept(&mut schedule, [3, 1]);
    assert_eq!(schedule.batch(0).unwrap(), [1, 3], "not those that are under way");
    assert_eq!(train(&mut schedule, 0), [1, 3]);
    assert_eq!(started(&mut schedule), [(4, 2), (5, 2)]);
    accept(&mut schedule, [5, 2, 0]);
    assert_eq!(schedule.batch(1).unwrap(), [0, 2], "the oldest first");
}

#[test]
fn bounded_groups_wait_for_weights_that_are_young_enough() {
    let mut schedule = schedule(Mode::Bounded { max_staleness: 1 }, 1, 9);
    assert_eq!(started(&mut schedule), [(0, 0), (1, 1)]);
    accept(&mut schedule, 0..2);
    let groups = schedule.batch(0).unwrap();
    schedule.see(Seen::Taken { step: 0, groups });
    schedule.see(Seen::Trained(1));
    assert_eq!(started(&mut schedule), [], "the seat is two steps behind what is published");
    schedule.see(Seen::Published(1));
    assert_eq!(started(&mut schedule), [(2, 2)]);
}

#[test]
fn run_that_goes_on_takes_the_same_groups_again() {
    let mut schedule = schedule(Mode::Bounded { max_staleness: 1 }, 2, 9).with_log(
        8,
        [3, 5].into(),
        [(6, 2), (7, 3)].into(),
    );
    schedule.see(Seen::Taken { step: 0, groups: vec![0, 4] });
    schedule.see(Seen::Taken { step: 1, groups: vec![1, 2] });
    schedule.see(Seen::Published(2));
    assert_eq!(started(&mut schedule), [], "two steps are to be done again");
    assert_eq!(train(&mut schedule, 0), [0, 4]);
    schedule.see(Seen::Published(2));
    assert_eq!(train(&mut schedule, 1), [1, 2]);
    assert_eq!(started(&mut schedule), [(6, 2), (7, 3)], "prompts that were in flight come first");
    assert_eq!(train(&mut schedule, 2), [3, 5]);
    assert_eq!(started(&mut schedule), [(8, 4), (9, 4)]);
}

#[test]
fn smaller_batch_takes_what_is_there() {
    let log = (0..5).collect();
    let mut schedule = schedule(Mode::Synchronous, 2, 9).with_log(5, log, BTreeMap::new());
    assert_eq!(started(&mut schedule), []);
    assert_eq!(train(&mut schedule, 0), [0, 1]);
    assert_eq!(train(&mut schedule, 1), [2, 3]);
    assert_eq!(started(&mut schedule), [(5, 2)]);
}

#[test]
fn group_that_no_engine_could_generate_comes_back_first() {
    let mut schedule = schedule(Mode::Synchronous, 2, 9);
    started(&mut schedule);
    schedule.see(Seen::Returned(1));
    schedule.see(Seen::LeftOut(0));
    let again = schedule.start();
    assert_eq!(again[0], Start { group: 1, seat: 0, is_new: false });
    assert_eq!(again[1], Start { group: 2, seat: 0, is_new: true });
}

/// What a simulated run was like.
#[derive(Debug, Default, PartialEq)]
struct Simulated {
    /// Share of the places that generate, once the run is under way.
    busy: f64,
    /// Time for a step, in times of a batch at full places.
    step: f64,
    /// Share of the tokens of taken groups that are too old to be trained on.
    too_old: f64,
    /// Share of long answers in the tokens that are trained on.
    long_trained: f64,
    /// The same in those that were drawn.
    long_drawn: f64,
    /// What was started, finished and taken, in order.
    trace: u64,
}

/// Engines and a learner in simulated time. Lengths of answers are log-normal with a 99th percentile of 10 times the
/// median, a place draws one token in a unit of time, and the learner takes half of a batch's time.
struct World {
    random: StdRng,
    schedule: Schedule,
    places: u64,
    now: f64,
    /// By time: the answer that ends then, or the step.
    events: BinaryHeap<Reverse<(Time, What)>>,
    queue: VecDeque<u64>,
    answers: HashMap<u64, Answer>,
    /// Answers that are missing in each group.
    left: HashMap<u64, u64>,
    /// When each step's weights came to the engines.
    published: Vec<f64>,
    free: u64,
    step: u64,
    is_training: bool,
    taken: BTreeSet<u64>,
    /// Tokens that were drawn, and trained on; then the same of long answers.
    tokens: [f64; 4],
    found: Simulated,
}

#[derive(Clone, Copy, PartialEq)]
struct Time(f64);

impl Eq for Time {}

impl PartialOrd for Time {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Time {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.0.total_cmp(&other.0)
    }
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum What {
    Answer(u64),
    Step,
}

#[derive(Clone, Copy)]
struct Answer {
    begin: f64,
    length: f64,
}

const GROUPS: u64 = 32;
const ANSWERS: u64 = 8;
/// Steps at either end of a run that do not count.
const EDGE: u64 = 10;
/// Of the logarithm of lengths: the 99th percentile of the normal distribution lies at 2.326.
const SIGMA: f64 = std::f64::consts::LN_10 / 2.326;

impl World {
    fn new(policy: Policy, places: u64, seed: u64) -> Self {
        World {
            random: StdRng::seed_from_u64(seed),
            schedule: Schedule::new(policy),
            places,
            now: 0.0,
            events: BinaryHeap::new(),
            queue: VecDeque::new(),
            answers: HashMap::new(),
            left: HashMap::new(),
            published: vec![0.0],
            free: places,
            step: 0,
            is_training: false,
            taken: BTreeSet::new(),
            tokens: [0.0; 4],
            found: Simulated::default(),
        }
    }

    fn note(&mut self, what: u64, number: u64) {
        let trace = self.found.trace ^ (what << 56) ^ number;
        self.found.trace = trace.wrapping_mul(0x0100_0000_01b3).rotate_left(7);
    }

    /// Time for a batch at full places.
    fn generation(&self) -> f64 {
        (GROUPS * ANSWERS) as f64 * (SIGMA * SIGMA / 2.0).exp() / self.places as f64
    }

    fn start(&mut self) {
        for start in self.schedule.start() {
            self.note(1, start.group);
            self.left.insert(start.group, ANSWERS);
            self.queue.extend((0..ANSWERS).map(|answer| start.group * ANSWERS + answer));
        }
        while self.free > 0 {
            let Some(answer) = self.queue.pop_front() else { break };
            self.free -= 1;
            let (a, b): (f64, f64) = (self.random.random(), self.random.random());
            let normal = (-2.0 * (1.0 - a).ln()).sqrt() * (std::f64::consts::TAU * b).cos();
            let length = (SIGMA * normal).exp();
            self.answers.insert(answer, Answer { begin: self.now, length });
            self.events.push(Reverse((Time(self.now + length), What::Answer(answer))));
        }
    }

    fn end(&mut self, what: What) {
        let What::Answer(answer) = what else {
            (self.step, self.is_training) = (self.step + 1, false);
            self.published.push(self.now);
            return publish(&mut self.schedule, self.step);
        };
        self.free += 1;
        let group = answer / ANSWERS;
        let left = self.left.get_mut(&group).unwrap();
        *left -= 1;
        if *left == 0 {
            self.note(2, group);
            self.schedule.see(Seen::Accepted(group));
        }
    }

    /// Has the learner begin its next step, if it can.
    fn train(&mut self, max_staleness: u64) {
        let Some(groups) = self.schedule.batch(self.step).filter(|_| !self.is_training) else { return };
        let young = self.published[self.step.saturating_sub(max_staleness) as usize];
        for group in &groups {
            self.note(3, *group);
            assert!(self.taken.insert(*group), "group {group} is taken twice");
            for answer in group * ANSWERS..(group + 1) * ANSWERS {
                let Answer { begin, length } = self.answers[&answer];
                let trained = length - (young - begin).clamp(0.0, length);
                let is_long = f64::from(u8::from(length > 3.0));
                let tokens = [length, trained, is_long * length, is_long * trained];
                self.tokens.iter_mut().zip(tokens).for_each(|(sum, tokens)| *sum += tokens);
            }
        }
        self.schedule.see(Seen::Taken { step: self.step, groups });
        self.is_training = true;
        self.events.push(Reverse((Time(self.now + self.generation() / 2.0), What::Step)));
    }
}

fn simulate(mode: Mode, places: u64, steps: u64, seed: u64) -> Simulated {
    simulate_as(Policy::new(mode, GROUPS, steps), places, seed)
}

fn simulate_as(policy: Policy, places: u64, seed: u64) -> Simulated {
    let Policy { mode, steps, .. } = policy;
    let mut world = World::new(policy, places, seed);
    let (mut busy, mut time) = (0.0, 0.0);
    while world.step < steps {
        world.start();
        let Some(Reverse((Time(at), what))) = world.events.pop() else {
            panic!("seed {seed}: nothing happens in step {}", world.step)
        };
        if (EDGE..steps - EDGE).contains(&world.step) {
            time += at - world.now;
            busy += (places - world.free) as f64 * (at - world.now);
        }
        world.now = at;
        world.end(what);
        world.train(mode.max_staleness());
    }
    let [drawn, trained, long_drawn, long_trained] = world.tokens;
    Simulated {
        busy: busy / (places as f64 * time),
        step: time / (steps - 2 * EDGE) as f64 / world.generation(),
        too_old: 1.0 - trained / drawn,
        long_trained: long_trained / trained,
        long_drawn: long_drawn / drawn,
        ..world.found
    }
}

/// Prints one table: `cargo test -p driftless-trainer --lib simulated -- --nocapture`.
#[test]
fn simulated_engines_stand_still_in_turns_and_not_when_bounded() {
    println!(
        "places of a batch | max staleness | generating | time of a step | too old | long, drawn | trained"
    );
    for share in [8, 4, 2] {
        let (places, seed) = (GROUPS * ANSWERS / share, 11 + share);
        let synchronous = simulate(Mode::Synchronous, places, 140, seed);
        for max_staleness in [0, 1, 2, 4] {
            let mode = match max_staleness {
                0 => Mode::Synchronous,
                _ => Mode::Bounded { max_staleness },
            };
            let run = simulate(mode, places, 140, seed);
            println!(
                "1/{share} {max_staleness} {:.3} {:.2} {:.4} {:.3} {:.3}",
                run.busy, run.step, run.too_old, run.long_drawn, run.long_trained
            );
            if share == 8 && max_staleness > 0 {
                assert!(run.busy >= 0.95, "seed {seed}: {run:?}");
                assert!(synchronous.step >= 2.0 * run.step, "seed {seed}: {synchronous:?}, {run:?}");
                assert!((run.long_trained - run.long_drawn).abs() <= 0.02, "seed {seed}: {run:?}");
            }
        }
    }
}

/// Prints one table too. Tokens of older weights count as too old.
#[test]
fn simulated_partial_rollouts_do_not_wait_for_the_longest() {
    println!("surplus | generating | time of a step | of older weights");
    let (places, seed) = (GROUPS * ANSWERS / 8, 19);
    let steps = [0, GROUPS / 4, GROUPS / 2, GROUPS].map(|surplus| {
        let policy = Policy { surplus, partial: true, ..Policy::new(Mode::Synchronous, GROUPS, 140) };
        let run = simulate_as(policy, places, seed);
        println!("{surplus} {:.3} {:.2} {:.4}", run.busy, run.step, run.too_old);
        run.step
    });
    assert!(steps.is_sorted_by(|more, less| more > less), "seed {seed}: {steps:?}");
    assert!(steps[0] >= 1.3 * steps[2], "seed {seed}: {steps:?}");
}

#[test]
fn simulated_run_is_the_same_at_the_same_seed() {
    let run = |seed| simulate(Mode::Bounded { max_staleness: 2 }, 64, 40, seed);
    assert_eq!(run(3), run(3));
    assert_ne!(run(3).trace, run(4).trace);
}
