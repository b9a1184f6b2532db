//! The rollout log alone, in another RL stack: two generators append, a trainer takes complete groups without
//! copying them, stops in the middle, and continues where its checkpoint says. A process that only looks reads
//! beside them.
//!
//! `cargo run --example rollout_log`

use std::error::Error;
use std::path::Path;

use driftless::buffer::sample::Shape;
use driftless::buffer::{
    Finish, GroupQuery, Identity, Log, Options, Position, Reader, Retention, Sample, Scalars, SyncPolicy,
    VersionSpan,
};

/// Samples of one prompt.
const GROUP: u64 = 4;
const PROMPTS: u64 = 12;

fn main() -> Result<(), Box<dyn Error>> {
    let dir = std::env::temp_dir().join(format!("rollout-log-example-{}", std::process::id()));
    generate(&dir)?;

    // A trainer that is stopped after two batches; its checkpoint holds the position it has reached.
    let checkpoint = train(&dir, Position(0), 2)?;
    println!("stopped; the checkpoint says position {checkpoint}");
    // A new process opens the same log and goes on: no group is trained twice, none is skipped.
    let end = train(&dir, checkpoint, usize::MAX)?;
    println!("done at position {end}");

    let log = open(&dir)?;
    println!("the mean reward is {}", mean_reward(&dir)?);
    let retired = log.retain(&Retention { consumed_by: vec!["trainer".into()], ..Retention::default() })?;
    println!(
        "removed {} segments that the trainer has consumed; oldest position is {}",
        retired.segments, retired.oldest
    );
    std::fs::remove_dir_all(&dir)?;
    Ok(())
}

fn open(dir: &Path) -> driftless::buffer::Result<Log> {
    let identity = Identity { run_id: [42; 16], model: "policy".into(), tokenizer_digest: [0; 32] };
    // One sync for the samples of a group.
    let sync = SyncPolicy::EveryRecords(GROUP as usize);
    Log::open(dir, Options::new(identity).with_sync(sync).with_segment_bytes(64 << 10))
}

/// Two generators share the log. The first copies its samples in, the second writes them in place.
fn generate(dir: &Path) -> Result<(), Box<dyn Error>> {
    let log = open(dir)?;
    std::thread::scope(|scope| {
        let copying = scope.spawn(|| (0..PROMPTS).step_by(2).try_for_each(|prompt| copy_in(&log, prompt)));
        let in_place =
            scope.spawn(|| (1..PROMPTS).step_by(2).try_for_each(|prompt| write_in_place(&log, prompt)));
        for generator in [copying, in_place] {
            generator.join().map_err(|_| "a generator panicked")??;
        }
        Ok::<_, Box<dyn Error>>(())
    })?;
    log.close()?;
    Ok(())
}

fn scalars(prompt: u64, n: u64) -> Scalars {
    let (sample_id, status) = (prompt * GROUP + n, Finish::Stop.code());
    Scalars {
        sample_id,
        group_id: prompt,
        rollout_id: 0,
        reward: (n % 2) as f32,
        status,
        ..Scalars::default()
    }
}

fn copy_in(log: &Log, prompt: u64) -> driftless::buffer::Result<()> {
    let tokens: Vec<i32> = (0..600).collect();
    for n in 0..GROUP {
        let pending = log.append(&Sample {
            scalars: scalars(prompt, n),
            prompt_len: 100,
            tokens: &tokens,
            log_probs: &[-0.5; 500],
            loss_mask: &[1; 500],
            spans: &[VersionSpan { version: 3, start: 0, end: 500 }],
            engine: "engine-a",
            ..Sample::default()
        })?;
        // Only the last wait has to sync; it covers the others.
        if n + 1 == GROUP {
            pending.wait()?;
        }
    }
    Ok(())
}

fn write_in_place(log: &Log, prompt: u64) -> driftless::buffer::Result<()> {
    for n in 0..GROUP {
        let mut space = log.reserve(&Shape { prompt: 100, response: 500, spans: 1, ..Shape::default() })?;
        space.set_scalars(scalars(prompt, n));
        for (at, token) in space.tokens_mut().iter_mut().enumerate() {
            *token = at as i32;
        }
        space.log_probs_mut().fill(-0.25);
        space.loss_mask_mut().fill(1);
        space.spans_mut()[0] = VersionSpan { version: 4, start: 0, end: 500 };
        space.commit()?.wait()?;
    }
    Ok(())
}

/// What any process can do while another one owns the log: it takes no lock.
fn mean_reward(dir: &Path) -> driftless::buffer::Result<f32> {
    let reader = Reader::open(dir)?;
    let rewards = reader.iter(reader.oldest()).map(|record| Ok(record?.scalars().reward));
    let rewards: Vec<f32> = rewards.collect::<driftless::buffer::Result<_>>()?;
    Ok(rewards.iter().sum::<f32>() / rewards.len() as f32)
}

/// Takes complete groups in the order in which they became complete, from `position` on; answers where it
/// stopped.
fn train(dir: &Path, mut position: Position, batches: usize) -> Result<Position, Box<dyn Error>> {
    let log = open(dir)?;
    let reader = log.reader();
    let mut cursor = log.cursor("trainer")?;
    for _ in 0..batches {
        let query = GroupQuery { completed_from: position, limit: 3, ..GroupQuery::complete(GROUP as usize) };
        let groups = reader.find(&query.at_most_stale(4, 1));
        let Some(last) = groups.last() else { break };
        for group in &groups {
            // These slices point into the mapped file; a tensor can be made from them without a copy.
            let trained: usize = group.records.iter().map(|record| record.response().len()).sum();
            let reward: f32 =
                group.records.iter().map(|record| record.scalars().reward).sum::<f32>() / GROUP as f32;
            println!("group {:2}: {trained} tokens, mean reward {reward}", group.group_id);
        }
        // First the trainer's own checkpoint, which decides; then the cursor, which lets the log forget.
        position = last.completed.next();
        cursor.commit(position)?;
    }
    Ok(position)
}

#[cfg(test)]
mod tests {
    #[test]
    fn example_runs() {
        super::main().unwrap();
    }
}
