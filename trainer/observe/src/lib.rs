//! Where a run of the loop is watched: [`Sink`](driftless_trainer::events::Sink)s beside the loop's own files.

mod otlp;
mod prometheus;
mod scalars;
mod tensorboard;

pub use otlp::Otlp;
pub use prometheus::Prometheus;
pub use tensorboard::TensorBoard;
