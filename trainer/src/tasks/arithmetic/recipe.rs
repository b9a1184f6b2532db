//! What makes a small model learn the task in minutes on two cores.

/// Settings of the demo's RL.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Recipe {
    /// Steps.
    pub rl_steps: u64,
    /// Learning rate.
    pub rl_lr: f64,
    /// Prompts of a step.
    pub rollout_batch_size: u64,
    /// Samples of a prompt.
    pub n_samples_per_prompt: u64,
    /// Longest answer, its end mark included.
    pub rollout_max_response_len: u32,
}

impl Default for Recipe {
    fn default() -> Self {
        Recipe {
            rl_steps: 120,
            rl_lr: 2e-4,
            rollout_batch_size: 256,
            n_samples_per_prompt: 4,
            rollout_max_response_len: 4,
        }
    }
}
