(* T6, the convergence statements put together with kappa = 1 (any order of blocks), and the simple corollary. *)
From Coq Require Import Reals Lra Psatz Lia.
From LCSB Require Import FinSum Vectors Blocks BlockDescent IdleMomentum IdleCycle.
Open Scope R_scope.

Section Rate.
Variables (n : nat) (blk b : nat -> nat) (f : vec -> R) (grad : vec -> vec) (Li : nat -> R).
Variables (Lmax L eta beta fmin : R) (x m : nat -> vec).
Hypothesis smooth : block_smooth n blk f grad Li.
Hypothesis Li_le : forall i, Li i <= Lmax.
Hypothesis L_nonneg : 0 <= L.
Hypothesis lip : lipschitz n grad L.
Hypothesis eta_pos : 0 < eta.
Hypothesis beta01 : 0 <= beta < 1.
Hypothesis run : idle_momentum blk b grad eta beta x m.
Hypothesis m0 : m 0%nat = (fun _ => 0).
Hypothesis below : forall y, fmin <= f y.
Let used t := nrm n (proj blk (b t) (grad (x t))).

Theorem idle_sum T : 0 < 1 - eta * Lmax / 2 - eta * beta / (1 - beta) * L ->
  psum (fun t => used t ^ 2) T
    <= (f (x 0%nat) - fmin) / (eta * (1 - eta * Lmax / 2 - eta * beta / (1 - beta) * L)).
Proof.
  intros P.
  pose proof (momentum_sum n blk b f grad Li Lmax L eta beta fmin 1 x m smooth Li_le L_nonneg lip eta_pos beta01
    run m0 below ltac:(lra)) as S.
  rewrite Rmult_1_l in S. apply S; [|exact P].
  intros K. rewrite pow1, Rmult_1_l. apply (momentum_mass n blk b grad eta beta x m); assumption.
Qed.

Theorem idle_cycles p K : 0 < 1 - eta * Lmax / 2 - eta * beta / (1 - beta) * L ->
  (forall k, visits_once n blk b (k * p) p) ->
  psum (fun k => nrm n (grad (x (k * p)%nat)) ^ 2) K
    <= (1 + eta * L * sqrt (INR p * (INR p - 1) / 2)) ^ 2
       * ((f (x 0%nat) - fmin) / (eta * (1 - eta * Lmax / 2 - eta * beta / (1 - beta) * L))).
Proof.
  intros P V.
  replace (eta * L * sqrt (INR p * (INR p - 1) / 2)) with (eta * L * 1 * sqrt (INR p * (INR p - 1) / 2)) by ring.
  apply (cycles_idle n p blk b grad L eta beta x m); try assumption; try lra.
  - apply div_nonneg; [specialize (below (x 0%nat)); lra|apply Rmult_lt_0_compat; lra].
  - apply idle_sum. exact P.
  - rewrite pow1, Rmult_1_l. apply (momentum_mass n blk b grad eta beta x m); assumption.
Qed.

(* eta <= min (1/(2 L_max), (1 - beta)/(2 beta L)); without division, so that beta = 0 needs no case *)
Theorem idle_simple T : 2 * eta * Lmax <= 1 -> 2 * eta * beta * L <= 1 - beta ->
  psum (fun t => used t ^ 2) T <= 4 * (f (x 0%nat) - fmin) / eta.
Proof.
  intros H1 H2.
  assert (C : eta * beta / (1 - beta) * L <= 1 / 2).
  { apply Rmult_le_reg_l with (1 - beta); [lra|].
    replace ((1 - beta) * (eta * beta / (1 - beta) * L)) with (eta * beta * L) by (field; lra). lra. }
  set (B := 1 - eta * Lmax / 2 - eta * beta / (1 - beta) * L).
  assert (B4 : 1 / 4 <= B) by (unfold B; lra).
  eapply Rle_trans; [apply idle_sum; fold B; lra|]. fold B.
  specialize (below (x 0%nat)).
  apply Rmult_le_reg_l with (eta * B); [apply Rmult_lt_0_compat; lra|].
  replace (eta * B * ((f (x 0%nat) - fmin) / (eta * B))) with (f (x 0%nat) - fmin) by (field; lra).
  replace (eta * B * (4 * (f (x 0%nat) - fmin) / eta)) with (4 * B * (f (x 0%nat) - fmin)) by (field; lra). nra.
Qed.
End Rate.
