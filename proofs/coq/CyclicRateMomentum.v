(* T6 in cyclic order with its kappa: the sum of squared block gradients and the cycle average. *)
From Coq Require Import Reals Lra Psatz Lia PeanoNat.
From LCSB Require Import FinSum Vectors Blocks BlockDescent IdleMomentum IdleCycle UncoupledLimit CyclicMass.
Open Scope R_scope.

Lemma coherence_nonneg beta p : 0 <= beta < 1 -> (0 < p)%nat -> 0 <= coherence beta p.
Proof.
  intros Hb Hp. pose proof (power_below_one beta p Hb Hp). unfold coherence.
  apply div_nonneg; [apply Rmult_le_pos; lra|apply Rmult_lt_0_compat; lra].
Qed.

Theorem idle_sum_cyclic : forall n p blk b f grad (Li : nat -> R) Lmax L eta beta fmin x m T,
  block_smooth n blk f grad Li -> (forall i, Li i <= Lmax) -> 0 <= L -> lipschitz n grad L ->
  0 < eta -> 0 <= beta < 1 -> idle_momentum blk b grad eta beta x m -> m 0%nat = (fun _ => 0) ->
  (forall y, fmin <= f y) -> (0 < p)%nat -> (forall j, (j < n)%nat -> (blk j < p)%nat) ->
  (forall t, b t = (t mod p)%nat) ->
  0 < 1 - eta * Lmax / 2 - sqrt (coherence beta p) * (eta * beta / (1 - beta) * L) ->
  psum (fun t => nrm n (proj blk (b t) (grad (x t))) ^ 2) T
    <= (f (x 0%nat) - fmin) / (eta * (1 - eta * Lmax / 2 - sqrt (coherence beta p) * (eta * beta / (1 - beta) * L))).
Proof.
  intros n p blk b f grad Li Lmax L eta beta fmin x m T Hs HL L0 Hl He Hb Hr Hm Hf Hp Hblk Hc P.
  apply (momentum_sum n blk b f grad Li Lmax L eta beta fmin (sqrt (coherence beta p)) x m); try assumption.
  - apply sqrt_pos.
  - intros K. rewrite pow2_sqrt by (apply coherence_nonneg; assumption).
    apply (coherent_mass n p blk b grad eta beta x m); assumption.
Qed.

Theorem idle_cycles_cyclic : forall n p blk b f grad (Li : nat -> R) Lmax L eta beta fmin x m K,
  block_smooth n blk f grad Li -> (forall i, Li i <= Lmax) -> 0 <= L -> lipschitz n grad L ->
  0 < eta -> 0 <= beta < 1 -> idle_momentum blk b grad eta beta x m -> m 0%nat = (fun _ => 0) ->
  (forall y, fmin <= f y) -> (0 < p)%nat -> (forall j, (j < n)%nat -> (blk j < p)%nat) ->
  (forall t, b t = (t mod p)%nat) ->
  0 < 1 - eta * Lmax / 2 - sqrt (coherence beta p) * (eta * beta / (1 - beta) * L) ->
  psum (fun k => nrm n (grad (x (k * p)%nat)) ^ 2) K
    <= (1 + eta * L * sqrt (coherence beta p) * sqrt (INR p * (INR p - 1) / 2)) ^ 2
       * ((f (x 0%nat) - fmin)
          / (eta * (1 - eta * Lmax / 2 - sqrt (coherence beta p) * (eta * beta / (1 - beta) * L)))).
Proof.
  intros n p blk b f grad Li Lmax L eta beta fmin x m K Hs HL L0 Hl He Hb Hr Hm Hf Hp Hblk Hc P.
  apply (cycles_idle n p blk b grad L eta beta x m); try assumption; try lra.
  - apply sqrt_pos.
  - apply div_nonneg; [specialize (Hf (x 0%nat)); lra|apply Rmult_lt_0_compat; lra].
  - intros k. apply cyclic_visits_once; [exact Hblk|]. intros i Hi.
    rewrite Hc, Nat.add_comm, Nat.mod_add, Nat.mod_small by lia. reflexivity.
  - apply (idle_sum_cyclic n p blk b f grad Li Lmax L eta beta fmin x m); assumption.
  - rewrite pow2_sqrt by (apply coherence_nonneg; assumption).
    apply (coherent_mass n p blk b grad eta beta x m); assumption.
Qed.
