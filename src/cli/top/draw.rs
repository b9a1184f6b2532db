//! How it looks: lines of text, which a terminal has in colours.

use super::seen::{Engine, Seen, Version};
use crate::cli::shared::output::cut;
use crate::cli::status::duration;
use ratatui::Frame;
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Steps of a figure's trend.
pub(super) const TREND_CHARS: usize = 60;
/// Columns of a name.
const NAME_CHARS: usize = 18;
/// Heights of a trend, and what one without a value has.
const HEIGHTS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
const GAP: char = ' ';
/// Parts of the engines' time that are shown.
const PARTS_MAX: usize = 6;

const GOOD: Color = Color::Green;
const BAD: Color = Color::Red;
const DIM: Color = Color::DarkGray;

/// Draws it from the upper edge on; what has no room is left out.
pub(super) fn draw(frame: &mut Frame<'_>, seen: &Seen, now: SystemTime, has_colours: bool) {
    let area = frame.area();
    let mut lines = seen.lines(now, usize::from(area.width));
    if !has_colours {
        lines = text(&lines).lines().map(|line| Line::raw(line.to_owned())).collect();
    }
    for (line, row) in lines.into_iter().zip(area.rows()) {
        frame.render_widget(line, row);
    }
}

/// The lines without colours.
pub(super) fn text(lines: &[Line<'_>]) -> String {
    lines.iter().map(|line| line.to_string().trim_end().to_owned()).collect::<Vec<_>>().join("\n")
}

impl Seen {
    /// Everything, in lines of at most so many columns.
    pub(super) fn lines(&self, now: SystemTime, columns: usize) -> Vec<Line<'static>> {
        let mut lines = vec![self.head(now)];
        lines.extend(self.alerts.iter().flat_map(|alert| {
            let remedy = format!("  {}", cut(alert.remedy, columns));
            [plain(&cut(&alert.text, columns), BAD), plain(&remedy, DIM)]
        }));
        if self.damaged > 0 {
            lines.push(plain(&format!("{} lines of its files are damaged", self.damaged), BAD));
        }
        let room = columns.saturating_sub(NAME_CHARS + 10).min(TREND_CHARS);
        lines.extend(section("Figures", self.titled().map(|(title, values)| figure(title, values, room))));
        let parts = self.goodput.iter().take(PARTS_MAX).map(|(part, of)| share(part, *of, room));
        lines.extend(section("Engines' time", parts));
        let engines = self.engines.iter().map(|engine| engine.line(now));
        lines.extend(section("Fleet", self.version.iter().map(Version::line).chain(engines)));
        lines.iter_mut().for_each(|line| shorten(line, columns));
        lines
    }

    fn head(&self, now: SystemTime) -> Line<'static> {
        let of = self.of.map_or_else(String::new, |of| format!(" of {of}"));
        let since = self.completed_at_ms.map(|at| format!(", the last one {} ago", since(now, at)));
        let bold = Style::new().add_modifier(Modifier::BOLD);
        Line::from(vec![
            Span::styled(cut(&self.name, NAME_CHARS), bold),
            Span::raw(format!("  {} steps{of}{}", self.steps, since.unwrap_or_default())),
        ])
    }
}

impl Engine {
    fn line(&self, now: SystemTime) -> Line<'static> {
        let colour = match self.phase.as_str() {
            "serving" => GOOD,
            "lost" => BAD,
            _ => Color::Yellow,
        };
        Line::from(vec![
            Span::raw(format!("{:30} ", cut(&self.url, 30))),
            Span::styled(format!("{:9}", cut(&self.phase, 9)), Style::new().fg(colour)),
            Span::raw(format!("{:>8}  {}", since(now, self.since_ms), cut(&self.why, 60))),
        ])
    }
}

impl Version {
    fn line(&self) -> Line<'static> {
        let served = match self.served_after_ms {
            Some(ms) => format!("served after {ms} ms"),
            None => "not served yet".to_owned(),
        };
        let behind =
            if self.behind > 0 { format!(", {} engines behind", self.behind) } else { String::new() };
        Line::raw(format!("version {}, {served}{behind}", self.number))
    }
}

/// A heading with its lines; nothing without any.
fn section(heading: &str, lines: impl Iterator<Item = Line<'static>>) -> Vec<Line<'static>> {
    let mut lines: Vec<_> = lines.collect();
    if !lines.is_empty() {
        lines.splice(0..0, [Line::default(), plain(heading, DIM)]);
    }
    lines
}

/// A figure: its name, the last value, and its trend.
fn figure(title: &str, values: &[Option<f64>], room: usize) -> Line<'static> {
    let last = values.iter().rev().find_map(|value| *value).unwrap_or_default();
    let trend = trend(&values[values.len().saturating_sub(room)..]);
    Line::from(vec![
        Span::raw(format!("{title:NAME_CHARS$}{:>9} ", number(last))),
        Span::styled(trend, Style::new().fg(Color::Cyan)),
    ])
}

/// Values as heights between their least and their most.
fn trend(values: &[Option<f64>]) -> String {
    let known = || values.iter().flatten().copied();
    let (least, most) = (known().fold(f64::INFINITY, f64::min), known().fold(f64::NEG_INFINITY, f64::max));
    let height = |value: f64| {
        let share = if most > least { (value - least) / (most - least) } else { 0.0 };
        HEIGHTS[(share * (HEIGHTS.len() - 1) as f64).round() as usize % HEIGHTS.len()]
    };
    values.iter().map(|value| value.map_or(GAP, height)).collect()
}

/// A part of the engines' time as a bar.
fn share(part: &str, share: f64, room: usize) -> Line<'static> {
    let colour = match part {
        "trained" | "evaluated" => GOOD,
        "waiting for a step" | "under way" | "prompts read" => Color::Cyan,
        _ => BAD,
    };
    let bar = "█".repeat((share * room as f64).round() as usize);
    let name = cut(part, NAME_CHARS + 4);
    Line::from(vec![
        Span::raw(format!("{name:width$}{:>4.0} % ", 100.0 * share, width = NAME_CHARS + 4)),
        Span::styled(bar, Style::new().fg(colour)),
    ])
}

/// A number in at most nine columns.
fn number(value: f64) -> String {
    match value.abs() {
        0.0 => "0".to_owned(),
        1e4..1e8 => format!("{value:.0}"),
        1e-3..1e4 => {
            format!("{value:.4}").chars().take(7).collect::<String>().trim_end_matches('.').to_owned()
        }
        _ => format!("{value:.1e}"),
    }
}

fn plain(text: &str, colour: Color) -> Line<'static> {
    Line::styled(text.to_owned(), Style::new().fg(colour))
}

/// How long ago a moment was, in milliseconds since 1970.
fn since(now: SystemTime, at_ms: u64) -> String {
    duration(now.duration_since(UNIX_EPOCH + Duration::from_millis(at_ms)).unwrap_or_default().as_secs_f64())
}

/// Cuts a line to so many columns.
fn shorten(line: &mut Line<'static>, columns: usize) {
    let mut left = columns;
    for span in &mut line.spans {
        if span.content.chars().count() > left {
            span.content = span.content.chars().take(left).collect::<String>().into();
        }
        left -= span.content.chars().count();
    }
}
