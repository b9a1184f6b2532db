//! What becomes of one prompt from step to step, on the page.

use crate::dashboard::{Dashboard, file};
use crate::log::run_with_samples;
use driftless_buffer::sample::{ColumnId, Element};
use driftless_buffer::{Kind, Log, Options, PromptState, Reader, Sample, Scalars};
use serde_json::json;

#[test]
fn the_same_prompt_is_shown_at_its_other_steps() {
    let dir = tempfile::tempdir().expect("a directory");
    let run_dir = run_with_samples(dir.path());
    let root = run_dir.join("log");
    let identity = Reader::open(&root).expect("a log").identity().expect("a segment").clone();
    let log = Log::open(&root, Options::new(identity)).expect("a log");
    let mut positions = Vec::new();
    // Of four groups of two answers, those of steps 10, 11 and 13 are of one row.
    for (group, row) in [(10_u64, 1), (11, 1), (12, 2), (13, 1)] {
        let of_group = Scalars { group_id: group, rollout_id: group, ..Scalars::default() };
        // The first answer has two samples. What is learned from is another reward than the one that was given.
        for (id, reward) in [(0, 1.0_f32), (Scalars::ANSWERS_MAX, 1.0), (1, (group - 10) as f32)] {
            let given = reward.to_le_bytes();
            let extra = [(ColumnId::REWARDS, Element::F32, &given[..])];
            let scalars = Scalars { sample_id: 2 * group + id, reward: -9.0, status: 1, ..of_group };
            let sample = Sample { scalars, prompt_len: 2, tokens: &[0, 1, 2], ..Sample::default() };
            let sample = Sample { log_probs: &[-1.0], loss_mask: &[1], extra: &extra, ..sample };
            positions.push(log.append(&sample).expect("room").wait().expect("a disk").position().0);
        }
        let note = json!({ "source": format!("prompts.jsonl:{row}") }).to_string();
        let scalars = Scalars { sample_id: group, status: PromptState::Done.code(), ..of_group };
        let prompt = Sample { kind: Kind::Prompt, scalars, metadata: note.as_bytes(), ..Sample::default() };
        log.append(&prompt).expect("room").wait().expect("a disk");
    }
    log.close().expect("a disk");
    // The group of step 10 waited for the step behind it.
    file(&run_dir, "ledger.jsonl", b"{\"step\":11,\"groups\":[10]}\n{\"step\":13,\"groups\":[13]}\n");
    let board = Dashboard::of(dir.path(), &[&run_dir], None);
    let again = |nth: usize| board.get(&format!("/api/sample?position={}", positions[nth]))["again"].clone();
    let of = |step: u64, reward: f64, nth: usize| json!({ "step": step, "reward": reward, "answers": 2, "position": positions[nth] });
    assert_eq!(again(3), json!([of(11, 0.5, 0), of(13, 2.0, 9)]));
    assert_eq!(again(11), json!([of(11, 0.5, 0), of(11, 1.0, 3)]));
    assert_eq!(again(6), json!([]), "no other group is of this row");
}
