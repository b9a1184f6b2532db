//! Answers that are durable before their scores: what a crash, a reward that is away and a filter leave of them.

use super::*;

/// Every record of the log, by sample id where it is an answer.
fn answers(log: &buffer::Reader) -> BTreeMap<u64, buffer::Record> {
    let records = log.iter(buffer::Position(0)).map(Result::unwrap);
    let answers = records.filter(|record| record.kind() == buffer::Kind::Sample);
    answers.map(|record| (record.scalars().sample_id, record)).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn answer_is_durable_before_its_group_and_asked_for_once() {
    let dir = tempfile::tempdir().unwrap();
    // All but one answer of three groups ends, and the last one never does.
    let echo = Echo { stuck_from: Some(GROUPS * SAMPLES - 1), ..Echo::default() };
    let first = rollouts(dir.path(), task(dir.path(), &["a"; 9], 0), echo);
    let running = Running::start(first.clone());
    while answers(&first.log.reader()).len() as u64 != GROUPS * SAMPLES - 1 {
        tokio::task::yield_now().await;
    }
    let before = answers(&first.log.reader());
    drop(first);
    running.close().await;

    let asked = Echo { stuck_from: Some(1), ..Echo::default() };
    let groups = asked.groups.clone();
    let second = rollouts(dir.path(), task(dir.path(), &["a"; 9], 0), asked);
    let running = Running::start(second.clone());
    let (numbers, _) = take(&second, 0).await;
    assert_eq!(numbers, [0, 1, 2]);
    // Those of the next step begin meanwhile.
    let asked = groups.lock().unwrap().range(..GROUPS).map(|(_, rids)| rids.len()).collect::<Vec<_>>();
    assert_eq!(asked, [1], "one answer was missing");
    let after = answers(&second.log.reader());
    for (sample, record) in before {
        let now = &after[&sample];
        assert_eq!((record.position(), record.tokens()), (now.position(), now.tokens()), "sample {sample}");
        assert!(now.is_scored() && now.scalars().reward == (sample % SAMPLES) as f32, "sample {sample}");
        let [asked, first, last] = now.times() else { panic!("{:?}", now.times()) };
        assert!(*first == 0 && 0 < *asked && asked <= last, "{:?}", now.times());
    }
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_that_are_not_learned_from_are_in_the_log_with_the_reason() {
    let dir = tempfile::tempdir().unwrap();
    let rollouts =
        rollouts(dir.path(), task(dir.path(), &["a", "fail", "same", "b", "c"], 0), Echo::default());
    let running = Running::start(rollouts.clone());
    assert_eq!(take(&rollouts, 0).await.0, [0, 3, 4]);
    running.stop().await;
    let log = rollouts.log.reader();
    let answers = answers(&log);
    let of = |group: u64| [&answers[&(group * SAMPLES)], &answers[&(group * SAMPLES + 1)]];
    assert!(of(1).iter().all(|failed| !failed.is_scored()), "no reward was given");
    for filtered in of(2) {
        assert_eq!(
            (filtered.verdict(), filtered.rewards()),
            (buffer::sample::Verdict::LeftOut, &[1.0, 1.0][..])
        );
    }
    let why = |group| note(&log.prompt(group).unwrap().unwrap())["dropped"].clone();
    assert!(why(1).as_str().unwrap().contains("one finite number"), "{}", why(1));
    assert_eq!(why(2), "filtered: all its rewards are equal");
    let found: Vec<_> = log.groups(0, SAMPLES as usize).iter().map(|group| group.group_id).collect();
    assert_eq!(found, [0, 3, 4], "queries find neither");
}

#[tokio::test(flavor = "multi_thread")]
async fn group_filtered_but_not_marked_done_is_filtered_again() {
    let dir = tempfile::tempdir().unwrap();
    let first = interrupted(dir.path()).await;
    // What a crash leaves between the scores of group 0 and the record that its prompt is done.
    let tokens = [first.task.source.prompt(0).await.unwrap().tokens, vec![1]].concat();
    for (kind, status) in
        [(buffer::Kind::Sample, 1), (buffer::Kind::Score, buffer::sample::Verdict::LeftOut.code())]
    {
        let sample = |sample_id: u64| Sample {
            kind,
            scalars: Scalars {
                sample_id,
                status,
                parts: 1,
                score_follows: kind == buffer::Kind::Sample,
                ..Scalars::default()
            },
            prompt_len: tokens.len() - 1,
            tokens: &tokens,
            log_probs: &[-0.5],
            loss_mask: &[1],
            ..Sample::default()
        };
        first.log.append_all(&(0..SAMPLES).map(sample).collect::<Vec<_>>()).unwrap();
    }
    drop(first);
    let second = rollouts(dir.path(), task(dir.path(), &["same", "a", "a", "a"], 0), Echo::default());
    let running = Running::start(second.clone());
    let (groups, since) = take(&second, 0).await;
    assert_eq!((groups, since.dropped.filtered), (vec![1, 2, 3], 1));
    running.stop().await;
}

/// A reward that is not there for so many questions. Those of the first three groups come together.
#[derive(Debug)]
struct Away(AtomicU64, u64, tokio::sync::Barrier);

#[async_trait]
impl Reward for Away {
    async fn score(&self, answers: &[Answer]) -> Result<Vec<Result<Given, Error>>, Error> {
        let asked = self.0.fetch_add(1, Ordering::SeqCst);
        if asked < GROUPS {
            self.2.wait().await;
        }
        if asked >= self.1 {
            return ByLabel.score(answers).await;
        }
        let (expected, found) = ("a number".to_owned(), "nothing after 60 s".to_owned());
        Err(Error::Reward { sample: answers[0].sample, expected, found, todo: "wait", is_away: true })
    }
}

fn with_reward_away(dir: &Path, questions: u64) -> Arc<Rollouts> {
    let reward = Arc::new(Away(AtomicU64::new(0), questions, tokio::sync::Barrier::new(GROUPS as usize)));
    let task = Task { reward, ..task(dir, &["a"; 9], 0) };
    let mut rollouts = rollouts(dir, task, Echo::default());
    Arc::get_mut(&mut rollouts).unwrap().options.reward_pause = Duration::from_millis(100);
    rollouts
}

/// A reward that ends at group 1, whenever it is asked about that.
#[derive(Debug)]
struct EndsAtGroupOne;

#[async_trait]
impl Reward for EndsAtGroupOne {
    async fn score(&self, answers: &[Answer]) -> Result<Vec<Result<Given, Error>>, Error> {
        if answers[0].sample / SAMPLES != 1 {
            return ByLabel.score(answers).await;
        }
        let (expected, found) = ("a number".to_owned(), "its end".to_owned());
        Err(Error::Reward { sample: answers[0].sample, expected, found, todo: "look", is_away: true })
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn group_that_ends_its_reward_each_time_is_left_out() {
    let dir = tempfile::tempdir().unwrap();
    let task = Task { reward: Arc::new(EndsAtGroupOne), ..task(dir.path(), &["a"; 9], 0) };
    let mut rollouts = rollouts(dir.path(), task, Echo::default());
    Arc::get_mut(&mut rollouts).unwrap().options.reward_pause = Duration::from_millis(1);
    let running = Running::start(rollouts.clone());
    let (groups, since) = take(&rollouts, 0).await;
    assert_eq!((groups, since.dropped.failed), (vec![0, 2, 3], 1));
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn reward_that_is_away_costs_no_answer() {
    let dir = tempfile::tempdir().unwrap();
    let first = with_reward_away(dir.path(), 2);
    let running = Running::start(first.clone());
    let (groups, since) = take(&first, 0).await;
    assert_eq!((groups, since.dropped), (vec![0, 1, 2], Dropped::default()));
    running.stop().await;
    let asked = answers(&first.log.reader());
    assert!(
        asked.values().zip(0..GROUPS * SAMPLES).all(|(record, sample)| record.scalars().sample_id == sample)
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn reward_that_stays_away_ends_the_run_and_leaves_its_answers() {
    let dir = tempfile::tempdir().unwrap();
    let first = with_reward_away(dir.path(), u64::MAX);
    let error = first.clone().run().await.unwrap_err();
    assert!(error.is_away(), "{error}");
    let log = first.log.reader();
    assert_eq!(log.prompts(PromptState::InFlight).len() as u64, GROUPS, "no prompt is consumed");
    let before: Vec<_> = answers(&log).values().map(buffer::Record::position).collect();
    assert_eq!(before.len() as u64, GROUPS * SAMPLES);
    while Arc::strong_count(&first) > 1 {
        tokio::task::yield_now().await;
    }
    drop((log, first));
    let second = rollouts(dir.path(), task(dir.path(), &["a"; 9], 0), Echo::default());
    let running = Running::start(second.clone());
    assert_eq!(take(&second, 0).await.0, [0, 1, 2]);
    let after = answers(&second.log.reader());
    let after: Vec<_> = after.values().map(buffer::Record::position).take(before.len()).collect();
    assert_eq!(before, after, "none is generated again");
    running.stop().await;
}
