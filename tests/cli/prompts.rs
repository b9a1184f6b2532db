//! What becomes of one prompt from step to step, on the page.

use crate::dashboard::{Dashboard, file};
use crate::log::run_with_samples;
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
        for answer in 0..2 {
            let reward = if answer == 0 { 1.0 } else { (group - 10) as f32 };
            let scalars = Scalars { sample_id: 2 * group + answer, reward, status: 1, ..of_group };
            let sample = Sample { scalars, prompt_len: 2, tokens: &[0, 1, 2], ..Sample::default() };
            let sample = Sample { log_probs: &[-1.0], loss_mask: &[1], ..sample };
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
    assert_eq!(again(2), json!([of(11, 0.5, 0), of(13, 2.0, 6)]));
    assert_eq!(again(7), json!([of(11, 0.5, 0), of(11, 1.0, 2)]));
    assert_eq!(again(4), json!([]), "no other group is of this row");
}
