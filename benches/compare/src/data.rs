//! Pairs of bf16 states of one model: synthetic with real-looking marginals, or read from checkpoint
//! directories.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::path::{Path, PathBuf};

use driftless_delta::bundle::Tensor;
use rayon::prelude::*;

/// Two states of one tensor.
#[derive(Debug, Clone)]
pub struct Pair {
    /// Name of the tensor.
    pub name: String,
    /// Its dimensions.
    pub shape: Vec<u64>,
    /// Little-endian bf16 before the step.
    pub base: Vec<u8>,
    /// The same after it.
    pub new: Vec<u8>,
}

impl Pair {
    /// Both states as the codec takes them.
    #[must_use]
    pub fn tensors(&self) -> [Tensor<'_>; 2] {
        let tensor = |bytes| Tensor { name: &self.name, dtype: "BF16", shape: &self.shape, bytes };
        [tensor(&self.base), tensor(&self.new)]
    }
}

/// Size of a synthetic model.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    /// Number of tensors.
    pub tensors: usize,
    /// Elements of each.
    pub elements: usize,
}

/// SplitMix64 (Steele, Lea and Flood 2014).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Two normals at a time (Box and Muller 1958).
    fn normals(&mut self) -> [f32; 2] {
        let unit = |bits: u64| ((bits >> 40) as f32 + 0.5) / (1_u64 << 24) as f32;
        let (radius, angle) =
            ((-2.0 * unit(self.next()).ln()).sqrt(), std::f32::consts::TAU * unit(self.next()));
        [radius * angle.cos(), radius * angle.sin()]
    }
}

fn bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16
}

/// One optimiser step as AdamW makes it: f32 masters around eight weight scales, a step of `rate` times a
/// clipped normal, both rounded to bf16. `rate` is searched so that about `density` of the elements change.
#[must_use]
pub fn synthetic(shape: Shape, density: f64, seed: u64) -> Vec<Pair> {
    let probe = Shape { tensors: shape.tensors.min(8), elements: 50_000 };
    let (mut low, mut high) = (1e-9_f32, 1e-1_f32);
    for _ in 0..24 {
        let rate = (low * high).sqrt();
        let differ = |pair: &Pair| {
            pair.base.chunks(2).zip(pair.new.chunks(2)).filter(|(base, new)| base != new).count()
        };
        let changed: usize = at_rate(probe, rate, seed).iter().map(differ).sum();
        if (changed as f64) < density * (probe.tensors * probe.elements) as f64 {
            low = rate;
        } else {
            high = rate;
        }
    }
    at_rate(shape, (low * high).sqrt(), seed)
}

/// Elements that are made one after the other: large tensors are made on all cores.
const PIECE: usize = 1 << 20;

fn at_rate(shape: Shape, rate: f32, seed: u64) -> Vec<Pair> {
    const SCALES: [f32; 8] = [0.008, 0.012, 0.016, 0.02, 0.025, 0.03, 0.04, 0.05];
    let tensor = |index: usize| {
        let scale = SCALES[index % SCALES.len()];
        let (mut base, mut new) = (vec![0; 2 * shape.elements], vec![0; 2 * shape.elements]);
        let pieces = base.par_chunks_mut(2 * PIECE).zip(new.par_chunks_mut(2 * PIECE));
        pieces.enumerate().for_each(|(piece, (base, new))| {
            let mut random = Random(seed ^ (index as u64) << 32 ^ (piece as u64) << 48);
            for (base, new) in base.as_chunks_mut::<2>().0.iter_mut().zip(new.as_chunks_mut::<2>().0) {
                let [weight, step] = random.normals();
                let weight = weight * scale;
                *base = bf16(weight).to_le_bytes();
                *new = bf16(weight - rate * (step * 0.3).clamp(-1.0, 1.0)).to_le_bytes();
            }
        });
        let name = format!("model.layers.{index}.mlp.up_proj.weight");
        Pair { name, shape: vec![shape.elements as u64], base, new }
    };
    (0..shape.tensors).into_par_iter().map(tensor).collect()
}

/// The bf16 tensors that two checkpoint directories have in common.
///
/// # Errors
/// Says which file could not be read.
pub fn checkpoints(base: &Path, new: &Path) -> Result<Vec<Pair>, String> {
    let (base, mut new) = (tensors(base)?, tensors(new)?);
    let pair = |(name, (shape, base)): (String, State)| {
        let (other, new) = new.remove(&name)?;
        (other == shape).then_some(Pair { name, shape, base, new })
    };
    Ok(base.into_iter().filter_map(pair).collect())
}

/// Dimensions and bytes.
type State = (Vec<u64>, Vec<u8>);

fn tensors(directory: &Path) -> Result<BTreeMap<String, State>, String> {
    let fail = |what: &dyn Display| format!("{}: {what}", directory.display());
    let mut tensors = BTreeMap::new();
    for path in entries(directory)? {
        if path.extension().is_some_and(|extension| extension == "safetensors") {
            let bytes = std::fs::read(&path).map_err(|e| fail(&e))?;
            let file = safetensors::SafeTensors::deserialize(&bytes).map_err(|e| fail(&e))?;
            for (name, view) in file.iter() {
                if view.dtype() == safetensors::Dtype::BF16 {
                    let shape = view.shape().iter().map(|&size| size as u64).collect();
                    tensors.insert(name.to_owned(), (shape, view.data().to_vec()));
                }
            }
        }
    }
    Ok(tensors)
}

/// The learning rates of a trace (`cargo xtask trace`) by name, each with the directories of its versions in
/// order.
///
/// # Errors
/// Says which directory could not be listed.
pub fn trace(directory: &Path) -> Result<Vec<(String, Vec<PathBuf>)>, String> {
    let mut rates = Vec::new();
    for path in entries(directory)? {
        let Some(rate) = name(&path).strip_prefix("lr-").filter(|rate| rate.parse::<f64>().is_ok()) else {
            continue;
        };
        let mut steps: Vec<(u64, PathBuf)> = entries(&path)?
            .into_iter()
            .filter_map(|step| Some((name(&step).strip_prefix("step-")?.parse().ok()?, step)))
            .collect();
        steps.sort();
        rates.push((rate.to_owned(), steps.into_iter().map(|(_, path)| path).collect()));
    }
    let size = |(rate, _): &(String, Vec<PathBuf>)| rate.parse().unwrap_or(f64::NAN);
    rates.sort_by(|a, b| size(a).total_cmp(&size(b)));
    Ok(rates)
}

fn name(path: &Path) -> &str {
    path.file_name().and_then(|name| name.to_str()).unwrap_or_default()
}

fn entries(directory: &Path) -> Result<Vec<PathBuf>, String> {
    let fail = |what: std::io::Error| format!("{}: {what}", directory.display());
    let entries = std::fs::read_dir(directory).map_err(fail)?;
    entries.map(|entry| Ok(entry.map_err(fail)?.path())).collect()
}
