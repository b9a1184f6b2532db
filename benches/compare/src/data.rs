//! Pairs of bf16 states of one model: synthetic with real-looking marginals, or read from two checkpoint directories.

use std::collections::BTreeMap;
use std::path::Path;

/// Base and new bytes of each tensor.
pub type Pairs = Vec<(Vec<u8>, Vec<u8>)>;

/// Size of a synthetic model.
#[derive(Clone, Copy)]
pub struct Shape {
    /// Number of tensors.
    pub tensors: usize,
    /// Elements of each.
    pub elements: usize,
}

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

/// One optimiser step as AdamW makes it: f32 masters around eight weight scales, a step of `rate` times a clipped normal, both
/// rounded to bf16. `rate` is searched so that about `density` of the elements change.
pub fn synthetic(shape: Shape, density: f64, seed: u64) -> Pairs {
    let probe = Shape { tensors: shape.tensors.min(8), elements: 50_000 };
    let (mut low, mut high) = (1e-9_f32, 1e-1_f32);
    for _ in 0..24 {
        let rate = (low * high).sqrt();
        let changed: usize = at_rate(probe, rate, seed)
            .iter()
            .map(|(base, new)| base.chunks(2).zip(new.chunks(2)).filter(|(a, b)| a != b).count())
            .sum();
        if (changed as f64) < density * (probe.tensors * probe.elements) as f64 {
            low = rate;
        } else {
            high = rate;
        }
    }
    at_rate(shape, (low * high).sqrt(), seed)
}

fn at_rate(shape: Shape, rate: f32, seed: u64) -> Pairs {
    const SCALES: [f32; 8] = [0.008, 0.012, 0.016, 0.02, 0.025, 0.03, 0.04, 0.05];
    (0..shape.tensors)
        .map(|tensor| {
            let mut random = Random(seed ^ (tensor as u64) << 32);
            let scale = SCALES[tensor % SCALES.len()];
            (0..shape.elements)
                .map(|_| {
                    let [weight, step] = random.normals();
                    let weight = weight * scale;
                    (
                        bf16(weight).to_le_bytes(),
                        bf16(weight - rate * (step * 0.3).clamp(-1.0, 1.0)).to_le_bytes(),
                    )
                })
                .fold((Vec::new(), Vec::new()), |(mut base, mut new), (a, b)| {
                    base.extend(a);
                    new.extend(b);
                    (base, new)
                })
        })
        .collect()
}

/// The bf16 tensors that two checkpoint directories have in common.
///
/// # Errors
/// Says which file could not be read.
pub fn checkpoints(base: &Path, new: &Path) -> Result<Pairs, String> {
    let (base, mut new) = (tensors(base)?, tensors(new)?);
    Ok(base
        .into_iter()
        .filter_map(|(name, base)| new.remove(&name).map(|new| (base, new)))
        .filter(|(base, new)| base.len() == new.len())
        .collect())
}

fn tensors(directory: &Path) -> Result<BTreeMap<String, Vec<u8>>, String> {
    let fail = |what: &dyn std::fmt::Display| format!("{}: {what}", directory.display());
    let mut tensors = BTreeMap::new();
    for entry in std::fs::read_dir(directory).map_err(|e| fail(&e))? {
        let path = entry.map_err(|e| fail(&e))?.path();
        if path.extension().is_some_and(|extension| extension == "safetensors") {
            let bytes = std::fs::read(&path).map_err(|e| fail(&e))?;
            let file = safetensors::SafeTensors::deserialize(&bytes).map_err(|e| fail(&e))?;
            for (name, view) in file.iter() {
                if view.dtype() == safetensors::Dtype::BF16 {
                    tensors.insert(name.to_owned(), view.data().to_vec());
                }
            }
        }
    }
    Ok(tensors)
}
