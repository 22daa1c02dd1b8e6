//! The policies that handled the remembered requests.

/// The policies of remembered requests, with a count each. There are few, so slots refer to them by
/// index.
#[derive(Default)]
pub(super) struct Policies(pub(super) Vec<(blake3::Hash, usize)>);

impl Policies {
    /// Counts a request of a policy and returns the index of the policy.
    pub(super) fn add(&mut self, policy: blake3::Hash) -> u32 {
        let all = &mut self.0;
        let at = all.iter().position(|(it, _)| *it == policy);
        // Reuses the index of a policy that has no requests left.
        let at = at.or_else(|| all.iter().position(|(_, count)| *count == 0));
        let at = at.unwrap_or_else(|| {
            all.push((policy, 0));
            all.len() - 1
        });
        all[at].0 = policy;
        all[at].1 += 1;
        u32::try_from(at)
            .expect("every policy here has a remembered request, and those fit into memory")
    }

    pub(super) fn remove(&mut self, number: u32) {
        self.0[number as usize].1 -= 1;
    }

    pub(super) fn digest(&self, number: u32) -> blake3::Hash {
        self.0[number as usize].0
    }
}
