//! The official client of Azure IoT Operations, unmodified, against the real binary. What its own tests and
//! examples check is checked here, and the versions besides: on the embedded broker, and behind a Mosquitto.
#![allow(missing_docs, clippy::unwrap_used)]

mod access;
mod leases;
mod locks;
mod operations;
mod peer;
mod place;
mod reconnecting;
mod restart;
mod scanning;
mod swaps;
mod watching;

/// A test of each case for each place where it runs: in both, unless a reason is given.
macro_rules! cases {
    ($($module:ident {
        $($(#[$attribute:meta])* $case:ident $(, not behind a broker: $reason:literal)?;)*
    })*) => {
        mod embedded {
            $(mod $module { $(
                $(#[$attribute])*
                #[test]
                fn $case() {
                    crate::run(crate::$module::$case(crate::place::Place::Embedded));
                }
            )* })*
        }
        mod attached {
            $(mod $module { $(
                cases!(@attached [$(#[$attribute])*] $module $case $($reason)?);
            )* })*
        }
    };
    (@attached [$($attributes:tt)*] $module:ident $case:ident) => {
        $($attributes)*
        #[test]
        fn $case() {
            crate::run(crate::$module::$case(crate::place::Place::Attached));
        }
    };
    (@attached [$($attributes:tt)*] $module:ident $case:ident $reason:literal) => {};
}

cases! {
    leases {
        acquire_renew_release;
        a_lease_ends_at_its_time;
        a_release_is_observed;
        auto_renewal_keeps_a_lease_beyond_its_time;
        a_fenced_key_outlives_its_lease;
    }
    locks {
        lock_and_unlock;
        unlocking_hands_over;
        expiry_hands_over;
        a_killed_holder_hands_over;
        five_clients_share_one_lock;
    }
    operations {
        versions_rise_and_belong_to_the_value;
        conditions_of_a_set;
        a_key_expires;
        asking_for_the_disk_is_no_error;
        fencing_tokens;
        the_quota_is_an_error_of_the_service;
        what_rules_forbid_is_an_error_of_the_service;
        keys_and_values_are_any_bytes;
        many_requests_at_once_are_each_answered;
        leaving_at_once_is_clean;
    }
    reconnecting {
        a_broken_connection_is_resumed;
        an_observation_ends_with_its_connection_and_begins_again, not behind a broker:
            "the store does not see the connection break, so the watch goes on";
    }
    restart {
        nothing_is_lost_or_doubled_in_10_kills;
        #[ignore = "takes minutes"]
        nothing_is_lost_or_doubled_in_100_kills;
    }
    scanning {
        patterns;
        changes_between_two_scans;
        many_keys_come_in_pages_each_once;
    }
    swaps {
        two_hundred_swaps_under_load_lose_and_double_nothing;
    }
    watching {
        changes_are_heard_while_observed;
        observing_twice_and_unobserving_nothing;
        expiry_is_heard_as_a_deletion;
        a_shut_down_client_hears_the_end;
        several_observers_hear_the_same;
    }
}

/// Runs a case. Two threads, since some wait for a process in between.
fn run(case: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(case);
}
