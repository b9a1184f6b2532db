//! What a turn costs behind a short and a long conversation, and what group commit saves: `cargo bench -p
//! driftless-agent`.

#![allow(clippy::unwrap_used, reason = "a measurement fails by panicking")]

#[allow(dead_code, unreachable_pub, reason = "tests use more of it")]
#[path = "../tests/sessions/toy.rs"]
mod toy;

use std::fs::File;
use std::io::Write as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use driftless_agent::message::{Ask, Message, Role};
use driftless_agent::session::{Bounds, Seen, Thoughts, Tree};
use driftless_agent::{Family, Journal};

const TEXT: &str = "a text of some words, which a tool has told, with 12 numbers and more\n";
/// Bytes of a turn in the journal: some hundred tokens with what they are.
const RECORD_BYTES: usize = 4096;
const WRITERS: usize = 256;
const TURNS_EACH: usize = 32;
const ALONE: usize = 256;

fn main() {
    let family = toy::family("qwen3");
    let (short, long) = (suffix(&family, 10), suffix(&family, 200));
    println!("a turn behind 10 turns: {short:?}, behind 200: {long:?}, {:.2}x", ratio(long, short));
    let whole = whole(&family, 200);
    println!("the whole of 200 turns encoded anew: {whole:?}, {:.0}x a turn", ratio(whole, long));
    let (together, alone) = (together(), alone());
    println!(
        "durable turns a second: {together:.0} of {WRITERS} sessions at once, {alone:.0} with one fdatasync a turn, {:.1}x",
        together / alone
    );
}

fn ratio(a: Duration, b: Duration) -> f64 {
    a.as_secs_f64() / b.as_secs_f64()
}

fn asked(talk: &[Message]) -> Ask {
    toy::ask(talk)
}

/// A conversation of `turns`, with a question behind it.
fn conversation(family: &Family, turns: usize) -> (Tree, Vec<Message>) {
    let mut tree = Tree::new(Bounds::default(), Thoughts::Kept);
    let mut talk = vec![toy::message(Role::System, "You help."), toy::user(&TEXT.repeat(8))];
    for turn in 0..turns {
        let Seen::New(plan) = tree.see(family, &asked(&talk)).unwrap() else {
            unreachable!("no turn is a retry")
        };
        let turned =
            tree.turn(family, *plan, toy::generation("The answer is this.", "<|im_end|>"), 1).unwrap();
        let at = tree.commit(turned).unwrap();
        talk.extend([tree.answer(at).message, toy::user(&format!("{turn} {}", TEXT.repeat(8)))]);
    }
    (tree, talk)
}

/// The time to see a turn.
fn suffix(family: &Family, turns: usize) -> Duration {
    let (tree, talk) = conversation(family, turns);
    let asked = asked(&talk);
    least(|| assert!(matches!(tree.see(family, &asked).unwrap(), Seen::New(plan) if plan.cached > 0)))
}

fn whole(family: &Family, turns: usize) -> Duration {
    let asked = asked(&conversation(family, turns).1);
    let tree = Tree::new(Bounds::default(), Thoughts::Kept);
    least(|| assert!(matches!(tree.see(family, &asked).unwrap(), Seen::New(plan) if plan.cached == 0)))
}

/// The least time of many: others use the machine too.
fn least(mut work: impl FnMut()) -> Duration {
    let times = (0..201).map(|_| {
        let begun = Instant::now();
        work();
        begun.elapsed()
    });
    times.min().unwrap()
}

fn together() -> f64 {
    let home = tempfile::tempdir_in(".").unwrap();
    let journal =
        Journal::open(&home.path().join("journal"), |records| Ok(vec![true; records.len()])).unwrap();
    let journal = Arc::new(journal);
    let runtime = tokio::runtime::Builder::new_multi_thread().build().unwrap();
    let begun = Instant::now();
    runtime.block_on(async {
        let write = |_| {
            let journal = journal.clone();
            tokio::spawn(async move {
                for _ in 0..TURNS_EACH {
                    journal.append(vec![7; RECORD_BYTES]).await.unwrap();
                }
            })
        };
        for writer in (0..WRITERS).map(write).collect::<Vec<_>>() {
            writer.await.unwrap();
        }
    });
    (WRITERS * TURNS_EACH) as f64 / begun.elapsed().as_secs_f64()
}

fn alone() -> f64 {
    let home = tempfile::tempdir_in(".").unwrap();
    let mut file = File::create(home.path().join("journal")).unwrap();
    let begun = Instant::now();
    for _ in 0..ALONE {
        file.write_all(&[7; RECORD_BYTES]).unwrap();
        file.sync_data().unwrap();
    }
    ALONE as f64 / begun.elapsed().as_secs_f64()
}
