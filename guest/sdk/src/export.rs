//! The macro that exports a [`Policy`](crate::Policy) as a component.

/// Exports a type that implements [`Policy`](crate::Policy) as the policy of this component, and
/// sets an allocator for short calls. On other targets than WebAssembly it only checks that the
/// type is a policy, so that the crate can be tested natively.
///
/// The documentation of this crate shows a complete policy with it.
#[macro_export]
macro_rules! export {
    ($policy:ty) => {
        const _: () = {
            const fn is_policy<P: $crate::Policy>() {}
            is_policy::<$policy>();
        };

        #[cfg(target_arch = "wasm32")]
        const _: () = {
            use ::std::boxed::Box;
            use ::std::cell::Cell;
            use ::std::string::String;
            use ::std::vec::Vec;
            use $crate::bindings::exports::statehouse::policy::handler::Guest;
            use $crate::{Change, Dialect, Info, Notification, Outcome, Request, Span};

            #[global_allocator]
            static ARENA: $crate::arena::Arena = $crate::arena::Arena::new();

            ::std::thread_local! {
                static POLICY: Cell<Option<&'static $policy>> = const { Cell::new(None) };
            }

            /// The configured policy. A host that calls before it configures breaks the contract,
            /// and the call traps; the backtrace then shows this function.
            fn configured() -> &'static $policy {
                match POLICY.get() {
                    Some(policy) => policy,
                    None => ::core::arch::wasm32::unreachable(),
                }
            }

            struct Component;

            impl Guest for Component {
                fn describe() -> Info {
                    // The host calls this first.
                    $crate::panics::report();
                    <$policy as $crate::Policy>::describe()
                }

                fn configure(options: Vec<(String, String)>) -> Result<(), String> {
                    let policy = <$policy as $crate::Policy>::configure(&options)?;
                    if POLICY.get().is_some() {
                        return Err(String::from(
                            "an instance is configured once; make a new one instead",
                        ));
                    }
                    // The policy lives as long as the instance.
                    POLICY.set(Some(Box::leak(Box::new(policy))));
                    // From here on calls free what they allocate.
                    ARENA.open();
                    Ok(())
                }

                fn route(payload: Vec<u8>) -> Option<Span> {
                    $crate::Policy::route(configured(), &payload)
                }

                fn handle(request: Request) -> Outcome {
                    $crate::Policy::handle(configured(), &mut $crate::Imports, &request)
                }

                fn notify(change: Change, dialect: Dialect) -> Notification {
                    $crate::Policy::notify(configured(), &change, dialect)
                }
            }

    $crate::bindings::export_component!(Component with_types_in $crate::bindings);
        };
    };
}
