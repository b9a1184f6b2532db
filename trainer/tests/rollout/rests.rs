//! Prompts that were easy come less often, also behind a crash.

use super::{Echo, Running, rollouts, take, task};
use driftless_trainer::rollout::{PromptNote, Rollouts};
use std::path::Path;
use std::sync::Arc;

/// Three prompts, of which the second is easy. A batch that is easy throughout is filtered.
fn run(dir: &Path) -> Arc<Rollouts> {
    let mut rollouts = rollouts(dir, task(dir, &["a", "same", "b"], 0), Echo::default());
    Arc::get_mut(&mut rollouts).unwrap().options.easy_threshold = Some(1.0);
    rollouts
}

/// What the source was asked for, by group, and from which row that is.
fn asked(run: &Rollouts, groups: u64) -> Vec<(u64, u64)> {
    let asked = (0..groups).map(|group| {
        let note = PromptNote::of(&run.log.reader().prompt(group).unwrap().unwrap());
        (note.asked(group), note.source.unwrap().line - 1)
    });
    asked.collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_easy_prompt_rests_also_behind_a_crash() {
    let dir = tempfile::tempdir().unwrap();
    let first = run(dir.path());
    let running = Running::start(first.clone());
    // Of the first three prompts one is filtered, and the next epoch begins in its place.
    assert_eq!(take(&first, 0).await.0, [0, 2, 3]);
    assert_eq!(take(&first, 1).await.0, [4, 5, 7]);
    // The easy prompt rests in the epoch of places 3 to 5, and is easy again in that of 6 to 8.
    let known = [(0, 0), (1, 1), (2, 2), (3, 0), (5, 2), (6, 0), (7, 1), (8, 2)];
    assert_eq!(asked(&first, 8), known);
    drop(first);
    running.close().await;

    let second = run(dir.path());
    let running = Running::start(second.clone());
    for (step, groups) in [[0, 2, 3], [4, 5, 7], [8, 9, 10], [11, 12, 14]].into_iter().enumerate() {
        assert_eq!(take(&second, step as u64).await.0, groups);
    }
    // It rests for two epochs now, those of places 9 to 14.
    let rest = [(9, 0), (11, 2), (12, 0), (14, 2), (15, 0), (16, 1)];
    assert_eq!(asked(&second, 14), [&known[..], &rest].concat());
    running.stop().await;
}
