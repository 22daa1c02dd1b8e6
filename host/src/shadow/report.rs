//! What a comparison came to: sums, and a few examples of each kind.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::limits;
use statehouse_core::policy::{Digest, Failure, Policy};
use statehouse_core::store::{Answer, SampledRequest, Transaction, Write};
use statehouse_core::words::{command_of, words};

/// A policy, as a report names it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PolicyName {
    /// Its name for itself.
    pub name: String,
    /// Its version.
    pub version: String,
    /// The BLAKE3 of its file.
    pub digest: Digest,
}

impl PolicyName {
    /// That of a policy.
    pub fn of(policy: &Policy<Transaction>) -> Self {
        Self {
            name: policy.name.clone(),
            version: policy.version.clone(),
            digest: policy.digest.into(),
        }
    }
}

/// A candidate beside the policy that answers.
#[derive(Clone, Debug, Serialize)]
pub struct ShadowReport {
    /// The candidate.
    pub policy: PolicyName,
    /// The one that answered.
    pub against: PolicyName,
    /// Requests that both decided.
    pub compared: u64,
    /// Answer and effect were the same.
    pub same: u64,
    /// The answers differed, in a byte or in the version.
    pub different_answer: u64,
    /// The answers were the same, and what was written was not.
    pub different_effect: u64,
    /// The candidate failed.
    pub failed: u64,
    /// Nobody can say.
    pub not_comparable: u64,
    /// There was no time for them.
    pub skipped: u64,
    /// Why requests were not comparable.
    pub reasons: BTreeMap<&'static str, u64>,
    /// By the word that a request begins with, in capitals.
    pub commands: BTreeMap<String, CommandCounts>,
    /// Some that differ: a few of each kind and command.
    pub examples: Vec<Example>,
}

/// The sums of one command.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct CommandCounts {
    /// Requests that both decided.
    pub compared: u64,
    /// Those of them that differ in any way.
    pub different: u64,
}

/// A request that differs. Bytes that are no plain text are escaped.
#[derive(Clone, Debug, Serialize)]
pub struct Example {
    /// How it differs.
    pub kind: &'static str,
    /// When it was handled, in the store's milliseconds.
    pub now_ms: u64,
    /// Whose it was.
    pub client: String,
    /// Its arguments, or its bytes where it is none of RESP3.
    pub request: Vec<String>,
    /// What came of it.
    pub active: Ran,
    /// What the candidate would have made of it.
    pub candidate: Ran,
}

/// What one policy made of a request.
#[derive(Clone, Debug, Serialize)]
pub struct Ran {
    /// Its answer; none where it failed.
    pub answer: Option<String>,
    /// The version that it is about.
    pub version: Option<String>,
    /// What it wrote, a line for each.
    pub writes: Vec<String>,
    /// Why it failed.
    pub failure: Option<String>,
}

/// How one request compares.
pub(super) enum Verdict {
    Same,
    DifferentAnswer(Answer, Vec<Write>),
    DifferentEffect(Answer, Vec<Write>),
    Failed(Failure),
    NotComparable(&'static str),
}

impl ShadowReport {
    /// Nothing yet.
    pub fn new(policy: PolicyName, against: PolicyName) -> Self {
        Self {
            policy,
            against,
            compared: 0,
            same: 0,
            different_answer: 0,
            different_effect: 0,
            failed: 0,
            not_comparable: 0,
            skipped: 0,
            reasons: BTreeMap::new(),
            commands: BTreeMap::new(),
            examples: Vec::new(),
        }
    }

    /// Whether anything differs.
    pub fn differs(&self) -> bool {
        self.different_answer + self.different_effect + self.failed > 0
    }

    pub(super) fn add(&mut self, observed: &SampledRequest, verdict: Verdict) {
        let (kind, candidate) = match verdict {
            Verdict::NotComparable(why) => {
                self.not_comparable += 1;
                *self.reasons.entry(why).or_default() += 1;
                return;
            }
            Verdict::Same => {
                self.compared += 1;
                self.same += 1;
                self.command(observed).compared += 1;
                return;
            }
            Verdict::DifferentAnswer(answer, writes) => {
                self.different_answer += 1;
                ("different_answer", Ran::of(&answer, &writes))
            }
            Verdict::DifferentEffect(answer, writes) => {
                self.different_effect += 1;
                ("different_effect", Ran::of(&answer, &writes))
            }
            Verdict::Failed(failure) => {
                self.failed += 1;
                let failed = Ran {
                    answer: None,
                    version: None,
                    writes: Vec::new(),
                    failure: Some(failure.to_string()),
                };
                ("failed", failed)
            }
        };
        self.compared += 1;
        let counts = self.command(observed);
        counts.compared += 1;
        counts.different += 1;
        let request = request_of(&observed.payload);
        let alike = |it: &&Example| it.kind == kind && it.request.first() == request.first();
        if self.examples.len() < limits::SHADOW_EXAMPLES_MAX
            && self.examples.iter().filter(alike).count() < limits::SHADOW_EXAMPLES_ALIKE_MAX
        {
            self.examples.push(Example {
                kind,
                now_ms: observed.context.now_ms,
                client: observed.client().escape_debug().to_string(),
                request,
                active: Ran {
                    answer: Some(shown(&observed.answer)),
                    version: observed.version.map(version),
                    writes: lines(&observed.writes),
                    failure: None,
                },
                candidate,
            });
        }
    }

    fn command(&mut self, observed: &SampledRequest) -> &mut CommandCounts {
        command_of(&mut self.commands, &observed.payload)
    }
}

impl Ran {
    fn of(answer: &Answer, writes: &[Write]) -> Self {
        Self {
            answer: Some(shown(&answer.payload)),
            version: answer.version.map(version),
            writes: lines(writes),
            failure: None,
        }
    }
}

fn version(stamp: statehouse_core::clock::Stamp) -> String {
    format!("{}:{}", stamp.wall, stamp.counter)
}

fn request_of(payload: &[u8]) -> Vec<String> {
    match words(payload) {
        Some(words) => words.into_iter().map(shown).collect(),
        None => vec![shown(payload)],
    }
}

fn shown(bytes: &[u8]) -> String {
    let cut = &bytes[..bytes.len().min(limits::SHADOW_EXAMPLE_BYTES_MAX)];
    let more = if cut.len() < bytes.len() { "…" } else { "" };
    format!("{}{more}", cut.escape_ascii())
}

fn lines(writes: &[Write]) -> Vec<String> {
    let first = writes.iter().take(limits::SHADOW_EXAMPLE_WRITES_MAX);
    let mut lines: Vec<String> = first.map(line).collect();
    if writes.len() > lines.len() {
        lines.push(format!("and {} more", writes.len() - lines.len()));
    }
    lines
}

fn line(write: &Write) -> String {
    let hidden = if write.hidden { "hidden " } else { "" };
    let key = shown(write.key());
    let Some(entry) = write.entry() else {
        return format!("remove {hidden}{key}");
    };
    let mut line = format!("put {hidden}{key} = {}", shown(entry.value()));
    if let Some(expires_ms) = entry.expires_ms() {
        line += &format!(", until {expires_ms}");
    }
    if let Some(fence) = entry.fence() {
        let node = shown(fence.node.as_bytes());
        line += &format!(", fence {}:{}:{node}", fence.wall, fence.counter);
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;
    use statehouse_core::clock::{Fence, Stamp};
    use statehouse_core::store::{Change, Entry};

    /// A candidate may write a fence as long as its memory, and each example of it was kept whole.
    #[test]
    fn a_write_is_shown_in_short_whatever_is_long_in_it() {
        let long = "x".repeat(10 * limits::SHADOW_EXAMPLE_BYTES_MAX);
        let fence = Fence {
            wall: 1,
            counter: 2,
            node: long.clone().into(),
        };
        let long = long.as_bytes();
        let entry = Entry::new(long, long, Stamp::default(), Some(&fence), Some(5));
        let write = Write::of(Change::Set(entry));
        let line = line(&write);
        assert!(line.contains(", fence 1:2:xxx") && line.ends_with("x…"));
        assert!(line.len() < 4 * limits::SHADOW_EXAMPLE_BYTES_MAX);
    }
}
