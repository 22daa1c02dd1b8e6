//! The report of a comparison: sums, and a few examples of each kind of difference.
//!
//! The size of a report must be bounded for any requests and policies.

use std::collections::BTreeMap;

use serde::Serialize;

use statehouse_config::limits;
use statehouse_core::clock::Stamp;
use statehouse_core::policy::{Digest, Failure, Policy};
use statehouse_core::store::{Answer, SampledRequest, Transaction, Write};
use statehouse_core::words::{command_of, words};
use statehouse_protocol::Shown;

/// Identifies a policy in a report.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PolicyName {
    /// The name that the policy declares.
    pub name: String,
    /// Its version.
    pub version: String,
    /// The BLAKE3 of its file.
    pub digest: Digest,
}

impl PolicyName {
    /// The name, version and digest of a policy.
    pub fn of(policy: &Policy<Transaction>) -> Self {
        Self {
            name: policy.name.clone(),
            version: policy.version.clone(),
            digest: policy.digest.into(),
        }
    }
}

/// The comparison of a candidate with the policy that handled the requests.
#[derive(Clone, Debug, Serialize)]
pub struct ShadowReport {
    /// The candidate.
    pub policy: PolicyName,
    /// The policy that handled the requests.
    pub against: PolicyName,
    /// Requests that both policies executed.
    pub compared: u64,
    /// The responses and the effects were the same.
    pub same: u64,
    /// The responses differed, in a byte or in the version, or only the active policy failed.
    pub different_answer: u64,
    /// The responses were the same, but the writes differed.
    pub different_effect: u64,
    /// The candidate failed, at the request or at a notification of its changes.
    pub failed: u64,
    /// The candidate could not be executed on the same state.
    pub not_comparable: u64,
    /// Requests that did not fit into the queue.
    pub skipped: u64,
    /// Why requests were not comparable.
    pub reasons: BTreeMap<&'static str, u64>,
    /// Counts by the first word of a request, in capitals.
    pub commands: BTreeMap<String, CommandCounts>,
    /// Examples of differences: a few of each kind and command.
    pub examples: Vec<Example>,
}

/// The sums of one command.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct CommandCounts {
    /// Requests that both policies executed.
    pub compared: u64,
    /// Requests that differ in any way.
    pub different: u64,
}

/// A request with a difference. Bytes other than plain text are escaped.
#[derive(Clone, Debug, Serialize)]
pub struct Example {
    /// The kind of difference.
    pub kind: &'static str,
    /// When it was handled, in the store's time in milliseconds.
    pub now_ms: u64,
    /// The client that sent it.
    pub client: String,
    /// Its arguments, or its bytes if it is not RESP3.
    pub request: Vec<String>,
    /// The result of the active policy.
    pub active: Ran,
    /// The result of the candidate.
    pub candidate: Ran,
}

/// The result of one policy for a request.
#[derive(Clone, Debug, Serialize)]
pub struct Ran {
    /// The response; none if the policy failed.
    pub answer: Option<String>,
    /// The version in the response.
    pub version: Option<String>,
    /// The writes, one line for each.
    pub writes: Vec<String>,
    /// Why the policy failed.
    pub failure: Option<String>,
}

pub(super) enum Verdict {
    Same,
    DifferentAnswer(Answer, Vec<Write>),
    DifferentEffect(Answer, Vec<Write>),
    Failed(Failure),
    NotComparable(&'static str),
}

impl ShadowReport {
    /// An empty report.
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

    /// Counts a request. `node` is the name of the store in versions.
    pub(super) fn add(&mut self, observed: &SampledRequest, node: &str, verdict: Verdict) {
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
                let ran = Ran::of(&answer.payload, answer.version, node, &writes);
                ("different_answer", ran)
            }
            Verdict::DifferentEffect(answer, writes) => {
                self.different_effect += 1;
                let ran = Ran::of(&answer.payload, answer.version, node, &writes);
                ("different_effect", ran)
            }
            Verdict::Failed(failure) => {
                self.failed += 1;
                ("failed", Ran::failed(&failure))
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
                client: observed.client().to_owned(),
                request,
                active: match &observed.failure {
                    Some(failure) => Ran::failed(failure),
                    None => Ran::of(&observed.answer, observed.version, node, &observed.writes),
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
    fn failed(failure: &Failure) -> Self {
        Self {
            answer: None,
            version: None,
            writes: Vec::new(),
            failure: Some(failure.to_string()),
        }
    }

    fn of(answer: &[u8], version: Option<Stamp>, node: &str, writes: &[Write]) -> Self {
        Self {
            answer: Some(shown(answer)),
            version: version.map(|it| it.display(node).to_string()),
            writes: lines(writes),
            failure: None,
        }
    }
}

fn request_of(payload: &[u8]) -> Vec<String> {
    match words(payload) {
        Some(words) => words.into_iter().map(shown).collect(),
        None => vec![shown(payload)],
    }
}

/// Bytes in a line of an example, which readers tell apart by their lines.
fn shown(bytes: &[u8]) -> String {
    let cut = Shown::cut(bytes, limits::SHADOW_EXAMPLE_BYTES_MAX);
    cut.on_one_line().to_string()
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
        line += &format!(", fence {:015}:{:05}:{node}", fence.wall, fence.counter);
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;
    use statehouse_core::clock::Fence;
    use statehouse_core::store::{Change, Entry};

    /// Regression: each byte of a character that is not ASCII was escaped.
    #[test]
    fn bytes_of_an_example_are_text_on_one_line() {
        let payload = "*2\r\n$4\r\nUHR?\r\n$6\r\nWär\n\\\r\n";
        assert_eq!(request_of(payload.as_bytes()), ["UHR?", "Wär\\n\\\\"]);
        assert_eq!(shown(b"$1\r\n\xff\r\n"), "$1\\r\\n\\xff\\r\\n");
    }

    /// A candidate may write a fence as long as its memory. An earlier version stored it in full.
    #[test]
    fn every_long_part_of_a_write_is_shortened() {
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
        assert!(line.contains(", fence 000000000000001:00002:xxx") && line.ends_with("x…"));
        assert!(line.len() < 4 * limits::SHADOW_EXAMPLE_BYTES_MAX);
    }
}
