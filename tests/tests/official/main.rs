//! Tests of the unmodified official client of Azure IoT Operations against the real binary, on the
//! embedded broker and behind Mosquitto. They check what the client's own tests and examples check,
//! and versions in addition.
#![allow(missing_docs, clippy::unwrap_used)]

mod access;
mod cluster;
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

/// Defines a test of each case for each place. A case without a reason runs in both places.
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
        lease_is_acquired_renewed_and_released;
        lease_ends_at_its_time;
        release_of_a_lease_notifies_observers;
        auto_renewed_lease_outlives_its_time;
        write_with_an_old_lease_token_is_refused;
    }
    locks {
        lock_is_acquired_and_released;
        unlock_passes_the_lock_on;
        expired_lock_passes_on;
        lock_of_a_killed_holder_passes_on;
        lock_shared_by_five_clients_excludes;
    }
    operations {
        versions_rise_and_belong_to_the_value;
        set_conditions_are_applied;
        key_expires_at_its_time;
        set_requesting_the_disk_succeeds;
        fenced_key_requires_a_current_token;
        set_over_the_key_quota_is_a_service_error;
        request_forbidden_by_rules_is_a_service_error;
        keys_and_values_of_any_bytes_are_returned;
        concurrent_requests_are_each_answered;
        client_leaving_at_once_ends_cleanly;
    }
    reconnecting {
        broken_connection_is_resumed;
        observation_ends_with_its_connection, not behind a broker:
            "the store does not detect the broken connection, so the watch continues";
    }
    restart {
        requests_over_10_kills_take_effect_once;
        #[ignore = "takes minutes"]
        requests_over_100_kills_take_effect_once;
    }
    scanning {
        scan_lists_the_keys_of_a_pattern;
        scan_after_deletions_lists_the_rest;
        scan_over_pages_lists_every_key_once;
    }
    swaps {
        policy_swaps_under_load_keep_every_request;
    }
    watching {
        changes_notify_only_during_an_observation;
        duplicate_observe_is_refused_and_unobserve_answers;
        expiry_notifies_as_a_deletion;
        shutdown_of_a_client_ends_its_observation;
        several_observers_get_the_same_changes;
        trace_contexts_of_others_change_nothing;
    }
}

/// Defines tests of some cases against the program for each target.
macro_rules! processors {
    ($($name:ident = $target:literal;)*) => {
        mod processors { $(
            mod $name {
                processors! { @$target
                    operations::versions_rise_and_belong_to_the_value;
                    operations::set_conditions_are_applied;
                    operations::key_expires_at_its_time;
                    operations::keys_and_values_of_any_bytes_are_returned;
                    locks::lock_shared_by_five_clients_excludes;
                    restart::requests_over_10_kills_take_effect_once;
                    scanning::scan_lists_the_keys_of_a_pattern;
                    swaps::policy_swaps_under_load_keep_every_request;
                    watching::several_observers_get_the_same_changes;
                }
            }
        )* }
    };
    (@$target:literal $($module:ident::$case:ident;)*) => { $(
        #[test]
        #[ignore = "emulates another processor"]
        fn $case() {
            if statehouse_tests::Processor::find($target).is_some() {
                crate::run(crate::$module::$case(crate::place::Place::Emulated($target)));
            }
        }
    )* };
}

processors! {
    aarch64 = "aarch64-unknown-linux-musl";
    armv7 = "armv7-unknown-linux-musleabihf";
    x86_64 = "x86_64-unknown-linux-musl";
}

/// Runs a case on two threads, since some cases block one of them to wait for a process.
fn run(case: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(case);
}
