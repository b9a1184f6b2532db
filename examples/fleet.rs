//! A host whose engines follow a run, and rollouts from them:
//! `cargo run --example fleet --features bridge -- STORE RUN CHECKPOINT_DIR ENGINE...`

use driftless::bridge::activate::{DiskActivator, DiskOptions};
use driftless::bridge::fleet::FleetOptions;
use driftless::bridge::{Expected, Fleet, GenerateRequest, Keys, Label, Rid, SamplingParams};
use driftless::store::open;
use driftless::transport::Follower;
use driftless::transport::activate::Activate;
use driftless::transport::follow::FollowerOptions;

type Result<T, E = Box<dyn std::error::Error>> = std::result::Result<T, E>;

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [store, run, checkpoint_dir, engines @ ..] = args.as_slice() else {
        return Err("expected STORE RUN CHECKPOINT_DIR ENGINE...".into());
    };
    // On a rollout host: the directory takes the run's newest version, and the engines beside it load it.
    let activator = |engine: &String| -> Result<Box<dyn Activate>> {
        Ok(Box::new(DiskActivator::new(engine, DiskOptions::default())?))
    };
    let activators = engines.iter().map(activator).collect::<Result<Vec<_>>>()?;
    let follower =
        Follower::open(open(store)?, FollowerOptions::new(run, checkpoint_dir, "host-0"), activators)?;
    let label: Label = follower.prepare(None)?.label.parse()?;
    follower.activate()?;

    // In the trainer: samples that this version, or a later one, has drawn.
    tokio::runtime::Runtime::new()?.block_on(async {
        let expected = Expected::from_checkpoint(checkpoint_dir.as_ref())?;
        let fleet = Fleet::attach(engines, &Keys::default(), &expected, FleetOptions::default()).await?;
        for sample in 0..4 {
            let sampling = SamplingParams { max_new_tokens: 16, ..SamplingParams::default() };
            let request = GenerateRequest::new(Rid::new(0, sample), vec![1, 2, 3], sampling);
            let sample = fleet.generate(request, Some(&label)).await?;
            println!("{:?} of {:?} from {}", sample.output_ids, sample.spans, sample.engine);
        }
        Ok(())
    })
}
