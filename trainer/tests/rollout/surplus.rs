//! More groups than a batch needs: those that are not finished with it are stopped, or go on.

use super::*;

const SURPLUS: u64 = 2;

/// An engine that does not answer the first requests of the groups behind the first batch.
#[derive(Default)]
struct Slow {
    /// Requests by group.
    asked: Arc<Mutex<BTreeMap<u64, u64>>>,
}

#[async_trait]
impl Engines for Slow {
    async fn generate(
        &self,
        request: GenerateRequest,
        minimum: Option<&Label>,
        told: Tell<'_>,
    ) -> driftless_bridge::Result<Generation> {
        let group = request.affinity.unwrap();
        let asked = {
            let mut asked = self.asked.lock().unwrap();
            let asked = asked.entry(group).or_default();
            *asked += 1;
            *asked
        };
        if (GROUPS..GROUPS + SURPLUS).contains(&group) && asked <= SAMPLES {
            std::future::pending::<()>().await;
        }
        Echo::default().generate(request, minimum, told).await
    }
}

fn with_surplus(dir: &Path, partial: bool) -> (Arc<Rollouts>, Arc<Mutex<BTreeMap<u64, u64>>>) {
    let engine = Slow::default();
    let asked = engine.asked.clone();
    let rollouts = rollouts(dir, task(dir, &["a"; 12], 0), Echo::default());
    let mut policy = Policy::new(Mode::Synchronous, GROUPS, u64::MAX);
    (policy.surplus, policy.partial) = (SURPLUS, partial);
    let queue = Queue::open(policy, &rollouts.log.reader(), SAMPLES, 0, BTreeMap::new());
    queue.published(0, None);
    let Rollouts { task, log, progress, options, .. } = Arc::into_inner(rollouts).unwrap();
    let (engines, queue) = (Arc::new(engine), Arc::new(queue));
    (Arc::new(Rollouts { engines, task, log, progress, queue, options }), asked)
}

#[tokio::test(flavor = "multi_thread")]
async fn surplus_groups_are_asked_for_again_behind_the_batch() {
    let dir = tempfile::tempdir().unwrap();
    let (rollouts, asked) = with_surplus(dir.path(), false);
    let running = Running::start(rollouts.clone());
    assert_eq!(take(&rollouts, 0).await.0, [0, 1, 2]);
    let (groups, since) = take(&rollouts, 1).await;
    assert_eq!((groups.len() as u64, since.dropped), (GROUPS, Dropped::default()));
    // Those that were stopped come first, and none is lost.
    while rollouts.logged_group(3).is_none() || rollouts.logged_group(4).is_none() {
        tokio::task::yield_now().await;
    }
    for group in [3, 4] {
        assert_eq!(asked.lock().unwrap()[&group], 2 * SAMPLES, "group {group}");
    }
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn surplus_groups_of_a_partial_rollout_are_asked_for_once() {
    let dir = tempfile::tempdir().unwrap();
    let (rollouts, asked) = with_surplus(dir.path(), true);
    let running = Running::start(rollouts.clone());
    assert_eq!(take(&rollouts, 0).await.0, [0, 1, 2]);
    assert_eq!(take(&rollouts, 1).await.0, [5, 6, 7], "beside those that go on");
    assert_eq!(take(&rollouts, 2).await.0, [8, 9, 10]);
    for group in [3, 4] {
        assert_eq!(asked.lock().unwrap()[&group], SAMPLES, "group {group}");
    }
    assert_eq!(rollouts.log.reader().prompts(PromptState::InFlight).len() as u64, SURPLUS);
    running.stop().await;
}
