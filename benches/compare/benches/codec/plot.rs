//! Ratio against density: ours, each peer's, the bounds.

use std::error::Error;
use std::path::Path;

use plotters::prelude::*;

use crate::sizes::Sizes;

type Column = (&'static str, fn(&Sizes) -> f64, RGBColor);

const COLUMNS: [Column; 6] = [
    ("bound, given the exponent", |sizes| sizes.conditional, RGBColor(150, 150, 150)),
    ("bound", |sizes| sizes.plain, RGBColor(200, 200, 200)),
    ("driftless, wire", |sizes| sizes.wire, RGBColor(0, 90, 181)),
    ("driftless, fast", |sizes| sizes.fast, RGBColor(100, 170, 230)),
    ("u16 gaps + xor + zstd-1", |sizes| sizes.gaps, RGBColor(220, 120, 30)),
    ("xor + zstd-1", |sizes| sizes.xor, RGBColor(190, 40, 50)),
];

/// Lines through `curve` (synthetic data), dots at `points` (real steps).
pub(crate) fn draw(path: &Path, curve: &[Sizes], points: &[Sizes]) -> Result<(), Box<dyn Error>> {
    let area = SVGBackend::new(path, (860, 520)).into_drawing_area();
    area.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&area)
        .caption("times smaller than dense bf16, by elements changed", ("sans-serif", 18))
        .margin(12)
        .x_label_area_size(42)
        .y_label_area_size(56)
        .build_cartesian_2d((0.015..60.0_f64).log_scale(), (1.0..12_000.0_f64).log_scale())?;
    chart
        .configure_mesh()
        .x_desc("elements changed in the step, % (lines: synthetic, dots: real steps)")
        .y_desc("dense bytes / bytes")
        .light_line_style(WHITE)
        .draw()?;
    for (name, bytes, color) in COLUMNS {
        let place = |sizes: &Sizes| (100.0 * sizes.density(), sizes.dense / bytes(sizes));
        chart
            .draw_series(LineSeries::new(curve.iter().map(place), color.stroke_width(2)))?
            .label(name)
            .legend(move |(x, y)| Rectangle::new([(x, y - 2), (x + 14, y + 2)], color.filled()));
        chart.draw_series(points.iter().map(|sizes| Circle::new(place(sizes), 4, color.filled())))?;
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .border_style(WHITE)
        .background_style(WHITE)
        .draw()?;
    area.present()?;
    Ok(())
}
